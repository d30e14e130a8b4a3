"""What `--config` names: METHOD_POSITION_SIZE, for instance ``asentmax_nape_420m``.

The recipe is that of `longspan lm train`: AdamW, 10 % of the steps to warm up, constant, a cosine down to a tenth over
the last 10 %. The text is the paper's, DCLM-Edu, streamed from the hub; any field can be changed from the command line.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.trainer import Trainer

from longspan.integrations.torchtitan.model import model_spec
from longspan.nn.decoder import AttentionConfig, DecoderConfig
from longspan.nn.llama import PRESETS, Size, preset
from longspan.train.lm import RECIPES, Recipe

METHODS = ("softmax", "ssmax", "entmax", "asentmax")
POSITIONS = ("nape", "rope")
# Beyond the presets: LLaMA-3.2's 1B with as many key heads as heads, at the paper's rate and tokens a step.
SIZES: dict[str, Size] = {
    **{name: PRESETS[name] for name in ("420m", "120m", "tiny")},
    "1b": Size(layers=16, dim=2048, hidden=8192, heads=32, vocabulary=128_256),
}
_RECIPES: dict[str, Recipe] = {**RECIPES, "1b": Recipe(2048, 256, 8, 38_000, 3e-4, 0.1)}
_VOCABULARY = {"120m": 50_257}  # GPT-2's, as the paper's scaling-law model has it


def _text(sample: dict[str, Any]) -> str:
    return sample["text"]


def _streamed(path: str) -> Any:
    from datasets import load_dataset

    return load_dataset(path, split="train", streaming=True)


DATASETS.setdefault("dclm_edu", DatasetConfig(path="HuggingFaceTB/dclm-edu", loader=_streamed, sample_processor=_text))


def sizes_of(size: str, method: str, position: str) -> DecoderConfig:
    """The decoder that a config's name stands for."""
    attention = AttentionConfig(method=method, position=position, slopes="exponential")
    if size in PRESETS:
        return preset(size, _VOCABULARY.get(size), attention)
    return DecoderConfig(**SIZES[size]._asdict(), attention=attention)


def trainer_config(size: str, method: str, position: str) -> Trainer.Config:
    """The run of a size, a method and a position."""
    recipe, sizes = _RECIPES[size], sizes_of(size, method, position)
    return Trainer.Config(
        model_spec=model_spec(sizes, f"{size}/{position}/{method}"),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=sizes.vocabulary)),
        optimizer=default_adamw(lr=recipe.learning_rate, weight_decay=recipe.weight_decay),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=recipe.steps // 10, decay_ratio=0.1, decay_type="cosine", min_lr_factor=0.1
        ),
        training=TrainingConfig(
            local_batch_size=recipe.micro_batch,
            global_batch_size=recipe.batch,
            seq_len=recipe.context,
            steps=recipe.steps,
        ),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="dclm_edu"),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(interval=500, last_save_model_only=False),
        compile=CompileConfig(enable=True, components=["model"]),
    )


def _registered() -> dict[str, Callable[[], Trainer.Config]]:
    return {
        f"{method}_{position}_{size}": partial(trainer_config, size, method, position)
        for size in SIZES
        for method in METHODS
        for position in POSITIONS
    }


globals().update(_registered())
