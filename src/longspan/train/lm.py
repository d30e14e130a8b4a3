"""Language models: a run as a value, and the step that moves it, on a CPU, a GPU or several.

What a step reads is a function of the seed and the step (`longspan.text.packing`), so a checkpoint holds the weights
and the optimiser, and a run resumes bit for bit.
"""

import hashlib
import json
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from longspan.nn.decoder import AttentionConfig, DecoderConfig
from longspan.nn.llama import Llama, preset
from longspan.text.corpora import open_corpus
from longspan.text.documents import CorpusError
from longspan.text.packing import TextBatch, Windows, evenly_spaced, stacked, window
from longspan.train.checkpoint import Checkpoint
from longspan.train.config import OptimizerConfig, Precision, check_training, from_json, tell_start, to_json
from longspan.train.distributed import (
    ALONE,
    Processes,
    ShardedOptimizer,
    local,
    recompute_blocks,
    reduce_gradients,
    reshard,
    shard,
)
from longspan.train.optimizers import Optimizer


def summed_losses(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """The sum of the losses, in nats, of the positions that count; logits are (batch, time, vocabulary)."""
    losses = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * mask.flatten()).sum()


@dataclass(frozen=True)
class LanguageConfig:
    """Everything that decides a training run of a language model."""

    corpus: str  # a folder
    data: str  # checksum of its training tokens: the folder may move, the tokens may not change
    model: DecoderConfig
    name: str = ""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    steps: int = 13_500
    cooldown: int = 1_350  # the last steps, over which the learning rate falls
    lowest_rate: float = 0.1  # of the peak, at the last step
    context: int = 2048
    batch: int = 256  # windows a step
    micro_batch: int = 16  # windows at once on a device; gradients of the others are added up
    activations: Literal["kept", "recomputed"] = "kept"  # for the backward pass; recomputed is slower and takes less
    documents: Literal["separate", "joined"] = "separate"
    seed: int = 0
    precision: Precision = "float32"
    log_every: int = 10
    save_every: int = 500
    validate_every: int = 500
    validate_windows: int = 64


class Recipe(NamedTuple):
    """How a preset is trained unless told otherwise."""

    context: int
    batch: int
    micro_batch: int
    steps: int
    learning_rate: float
    weight_decay: float


RECIPES: dict[str, Recipe] = {
    # The paper's: 524K tokens a batch, 7B in all. It does not tell the weight decay; torchtitan's is 0.1.
    "420m": Recipe(2048, 256, 16, 13_500, 3e-4, 0.1),
    "120m": Recipe(1024, 1024, 32, 4_768, 6e-4, 0.001),  # the paper's scaling-law model: 1M tokens a batch, 5B in all
    # Ours: the smaller, the faster.
    "50m": Recipe(1024, 128, 64, 2_000, 1e-3, 0.1),
    "10m": Recipe(512, 64, 64, 2_000, 1e-3, 0.1),
    "tiny": Recipe(128, 16, 16, 300, 3e-3, 0.1),
}


def language_recipe(
    corpus: Path,
    size: str = "tiny",
    method: str = "asentmax",
    position: str = "nape",
    *,
    steps: int | None = None,
    context: int | None = None,
) -> LanguageConfig:
    """The run of a preset on a corpus: 10 % of the steps to warm up, the last 10 % to cool down to a tenth."""
    opened = open_corpus(corpus)
    attention = AttentionConfig(method=method, position=position, slopes="exponential")
    model = preset(size, opened.tokenizer.vocabulary, attention)
    recipe = RECIPES[size]
    steps = recipe.steps if steps is None else steps
    return LanguageConfig(
        corpus=str(corpus),
        data=opened.checksum,  # the trainer reads the tokens
        model=model,
        name=f"lm/{size}/{position}/{method}",
        optimizer=OptimizerConfig(
            learning_rate=recipe.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=recipe.weight_decay,
            warmup=steps // 10,
        ),
        steps=steps,
        cooldown=steps // 10,
        context=recipe.context if context is None else context,
        batch=recipe.batch,
        micro_batch=recipe.micro_batch,
    )


def check(config: LanguageConfig) -> None:
    """Raises ValueError for a run that cannot be, by the name of the field."""
    counts = ("steps", "context", "batch", "micro_batch")
    for name in (*counts, "log_every", "save_every", "validate_every", "validate_windows"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
    if not 0 <= config.cooldown <= config.steps:
        raise ValueError(f"cooldown ({config.cooldown}) must be between 0 and steps ({config.steps})")
    if not 0 <= config.lowest_rate <= 1:
        raise ValueError(f"lowest_rate is a share of the peak, between 0 and 1, got {config.lowest_rate}")
    if not config.optimizer.learning_rate > 0:
        raise ValueError(f"optimizer.learning_rate must be positive, got {config.optimizer.learning_rate}")
    check_training(config.model, config.optimizer, config.seed)
    if config.model.attention.qk_noise:  # what opens it, and what resumes with it, belongs to the tasks' trainer
        raise ValueError(
            "model.attention.qk_noise is for the tasks: language models are trained without it, set it to 0"
        )


def fingerprint(config: LanguageConfig) -> str:
    """Twelve hex digits that two runs share exactly when they train the same way on the same tokens.

    Where the corpus lies, what fits in memory at once and how closely a run is watched are left out.
    """
    left_out = {"corpus", "name", "micro_batch", "activations"}
    left_out |= {"log_every", "save_every", "validate_every", "validate_windows"}
    typed = from_json(LanguageConfig, to_json(config))  # a learning rate of 1 is one of 1.0
    fields = {key: value for key, value in to_json(typed).items() if key not in left_out}
    tell_start(fields["model"]["attention"])
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=6).hexdigest()


def learning_rate(step: int, config: LanguageConfig) -> float:
    """Linear warm-up, constant, then a cosine down to `lowest_rate` over the cooldown; as a fraction of the peak."""
    warmup = min(1.0, (step + 1) / max(config.optimizer.warmup, 1))
    since = step + 1 - (config.steps - config.cooldown)
    if since <= 0:
        return warmup
    fallen = 0.5 * (1 - math.cos(math.pi * since / config.cooldown))  # 0 to 1
    return warmup * (1 - (1 - config.lowest_rate) * fallen)


class Metrics(NamedTuple):
    """Means over the steps since the last look."""

    loss: float
    gradient_norm: float


class LanguageTrainer:
    """The state of a run and the step that moves it; of several processes, all call every method together."""

    def __init__(
        self,
        config: LanguageConfig,
        device: torch.device | str = "cpu",
        processes: Processes = ALONE,
        build: Callable[[DecoderConfig], Llama] = Llama,
    ):
        """`build` makes the model, for one that differs from what the config can say."""
        check(config)
        if config.batch % processes.size:
            raise ValueError(f"batch ({config.batch}) must be a multiple of the number of processes ({processes.size})")
        self.config, self.device, self.processes = config, torch.device(device), processes
        corpus = open_corpus(Path(config.corpus))
        if corpus.tokenizer.vocabulary != config.model.vocabulary:
            raise CorpusError(
                f"{config.corpus} has {corpus.tokenizer.vocabulary} tokens, the model's vocabulary is "
                f"{config.model.vocabulary}"
            )
        stream = corpus.split("train")
        if stream.checksum != config.data:
            raise CorpusError(f"{config.corpus} holds other tokens ({stream.checksum}) than the run's ({config.data})")
        separate = config.documents == "separate"
        self.windows = Windows(stream, config.context, config.batch, seed=config.seed, separate=separate)
        held_out = evenly_spaced(corpus.split("validation"), config.context, config.validate_windows, separate)
        self.held_out = processes.share(held_out)
        torch.manual_seed(config.seed)
        self.model = build(config.model).to(self.device)
        self._judge = summed_losses
        self.optimizer = self._prepared()
        self.step = 0
        self._sums = torch.zeros(2, device=self.device)  # loss, gradient norm
        self._since = 0
        self._drawer = ThreadPoolExecutor(1)
        self._ahead: tuple[int, Future[TextBatch]] | None = None  # a step, and its batch, drawn while another one runs

    def _prepared(self) -> Optimizer:
        """Makes the model what it is on this device and this process; returns the optimiser of it."""
        if self.config.activations == "recomputed":
            recompute_blocks(self.model)
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            for block in self.model.blocks:  # one block is compiled and serves every layer
                block.compile()
            # Logits are the largest tensors there are: compiled, none is written in float32.
            self._judge = torch.compile(summed_losses)
        if self.processes.size == 1:
            return Optimizer(self.model, self.config.optimizer)
        shard(self.model, self.processes, self.config.precision)
        return ShardedOptimizer(self.model, self.config.optimizer, self.processes)

    @property
    def tokens_a_step(self) -> int:
        return self.config.batch * self.config.context

    def advance(self) -> None:
        """Take one step."""
        batch = self._batch()
        counted = self.processes.total(batch.mask.sum())
        loss = torch.zeros((), device=self.device)
        parts = batch.split(self.config.micro_batch)
        for number, part in enumerate(parts, start=1):
            if self.processes.size > 1:
                reduce_gradients(self.model, number == len(parts))
            share = self._loss(part.to(self.device)) / counted  # of the mean over the whole batch
            share.backward()
            loss += share.detach()
        gradients: dict[str, Tensor] = {name: parameter.grad for name, parameter in self.model.named_parameters()}  # type: ignore[misc]
        if self.processes.size > 1:
            gradients = {name: local(gradient) for name, gradient in gradients.items()}
        self.optimizer.rate.fill_(learning_rate(self.step, self.config))
        norm = self.optimizer.step(gradients)
        self.model.zero_grad(set_to_none=True)
        self._sums += torch.stack([self.processes.total(loss), norm])
        self.step += 1
        self._since += 1

    def _batch(self) -> TextBatch:
        """The batch of this step, drawn ahead if it was; the next one is begun."""
        if self._ahead is None or self._ahead[0] != self.step:
            self._ahead = self.step, self._drawer.submit(self._draw, self.step)
        batch = self._ahead[1].result()
        if self.step + 1 < self.config.steps:
            self._ahead = self.step + 1, self._drawer.submit(self._draw, self.step + 1)
        return batch

    def _draw(self, step: int) -> TextBatch:
        """This process's windows of a step: which ones all of them read does not depend on how many there are."""
        starts = self.windows.starts(step)[self.processes.rank :: self.processes.size]
        separate = self.windows.separate
        batch = stacked([window(self.windows.stream, start, self.config.context, separate) for start in starts])
        return batch.pinned() if self.device.type == "cuda" else batch

    def metrics(self) -> Metrics:
        """The means since the last call; on a GPU this waits for the steps to end."""
        loss, norm = (self._sums / max(self._since, 1)).tolist()
        self._sums.zero_()
        self._since = 0
        return Metrics(loss, norm)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Nats a token over the validation windows."""
        self.model.eval()
        losses = [self._loss(part.to(self.device)) for part in self.held_out.split(self.config.micro_batch)]
        self.model.train()
        if self.processes.size > 1:
            reshard(self.model)
        return float(self.processes.total(torch.stack(losses).sum()) / self.processes.total(self.held_out.mask.sum()))

    def broken(self) -> str | None:
        """The name of a parameter that is not finite, if there is one."""
        parameters = self.optimizer.parameters
        counts = [(~parameter.isfinite()).sum() for parameter in parameters.values()]
        found = self.processes.total(torch.stack(counts)).tolist()
        return next((name for name, count in zip(parameters, found, strict=True) if count), None)

    def _loss(self, batch: TextBatch) -> Tensor:
        """The sum of the losses of the positions that count."""
        bf16 = self.config.precision == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            logits = self.model(batch.tokens, documents=batch.documents)  # (B, T, V)
        return self._judge(logits, batch.targets, batch.mask)

    def checkpoint(self) -> Checkpoint:
        """The same for any number of processes; only the first one's is whole."""
        if isinstance(self.optimizer, ShardedOptimizer):
            weights = self.optimizer.whole_parameters()
        else:
            weights = self.model.state_dict()
        tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
        tensors |= {"log.sums": self._sums, "log.steps": torch.tensor(self._since)}
        return Checkpoint(self.step, to_json(self.config), tensors)

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from `checkpoint`, which must come from the same config."""
        if fingerprint(from_json(LanguageConfig, checkpoint.config)) != fingerprint(self.config):
            raise ValueError("the checkpoint comes from another config; start a new run to change a field")
        if "optimizer.count" not in checkpoint.tensors:
            raise ValueError("the checkpoint has no optimiser, it was tuned after training: it cannot go on")
        weights = _under("model.", checkpoint.tensors)
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.load_parameters(weights)
        else:
            self.model.load_state_dict(weights)
        self.optimizer.load(_under("optimizer.", checkpoint.tensors))
        self._sums.copy_(checkpoint.tensors["log.sums"])
        self.step, self._since = checkpoint.step, int(checkpoint.tensors["log.steps"])


def language_model_of(checkpoint: Checkpoint, device: torch.device | str = "cpu") -> tuple[Llama, LanguageConfig]:
    """The model a checkpoint holds, rebuilt from its own config."""
    config = from_json(LanguageConfig, checkpoint.config)
    model = Llama(config.model)
    model.load_state_dict(_under("model.", checkpoint.tensors))
    return model.to(device).eval(), config


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
