"""The torchtitan plug-in: its model is ours, its configs are found by name, and torchtitan's trainer trains it."""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")
pytestmark = pytest.mark.filterwarnings("ignore")  # of torchtitan's and its dependencies' own making

from tiny_text import tiny_corpus  # noqa: E402

from longspan.integrations.torchtitan import config_registry  # noqa: E402
from longspan.integrations.torchtitan.model import documents_of, model_config, refuse  # noqa: E402
from longspan.integrations.torchtitan.weights import llama_of, load_checkpoint, our_name, their_name  # noqa: E402
from longspan.nn.llama import Llama  # noqa: E402

CASES = [(method, position) for method in config_registry.METHODS for position in config_registry.POSITIONS]


def built(method: str, position: str) -> Any:
    """As torchtitan builds it: without memory first, then at its start."""
    with torch.device("meta"):
        model = model_config(config_registry.sizes_of("tiny", method, position)).build()
    model.to_empty(device="cpu")
    model.init_weights()
    return model


@pytest.mark.parametrize(("method", "position"), CASES)
def test_its_logits_and_gradients_are_ours(method: str, position: str) -> None:
    theirs = built(method, position)
    ours = llama_of(theirs.state_dict(), config_registry.sizes_of("tiny", method, position))
    tokens = torch.randint(2048, (2, 40))
    positions = torch.arange(40).repeat(2, 1)
    positions[0, 11:] = torch.arange(29)  # two documents in the first row
    said = theirs(tokens, positions=positions)
    torch.testing.assert_close(said, ours(tokens, documents=documents_of(positions)), rtol=0, atol=0)
    said.square().sum().backward()
    ours(tokens, documents=documents_of(positions)).square().sum().backward()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(parameter.grad, ours.get_parameter(our_name(name)).grad)


@pytest.mark.parametrize("method", config_registry.METHODS)
def test_it_starts_as_ours_does(method: str) -> None:
    ours = Llama(config_registry.sizes_of("tiny", method, "nape"))
    state = built(method, "nape").state_dict()
    assert {our_name(name) for name in state} == set(ours.state_dict())
    for name, tensor in state.items():
        like = ours.state_dict()[our_name(name)]
        assert tensor.shape == like.shape
        assert their_name(our_name(name)) == name
        assert float(tensor.mean()) == pytest.approx(float(like.mean()), abs=0.03)
        assert float(tensor.std()) == pytest.approx(float(like.std()), rel=0.3, abs=0.02)


def test_a_block_compiles_as_one_graph() -> None:
    model = built("asentmax", "nape")
    x, positions = torch.randn(1, 16, 64), torch.arange(16)[None]
    plain = model.layers["0"](x, None, positions)
    torch.testing.assert_close(
        torch.compile(model.layers["0"], backend="eager", fullgraph=True)(x, None, positions), plain
    )


def test_sizes_and_recipes_have_names() -> None:
    config = config_registry.ssmax_rope_420m()  # type: ignore[attr-defined]
    assert (config.training.steps, config.training.seq_len, config.training.global_batch_size) == (13_500, 2048, 256)
    sizes = config.model_spec.model.sizes
    assert (sizes.layers, sizes.dim, sizes.attention.method, sizes.attention.position) == (24, 768, "ssmax", "rope")
    assert config_registry.asentmax_nape_1b().model_spec.flavor == "1b/nape/asentmax"  # type: ignore[attr-defined]


def test_a_shorter_run_as_the_docs_have_it_warms_up_for_a_tenth() -> None:
    from torchtitan.config import ConfigManager

    page = (Path(__file__).parent.parent / "docs/language-models.md").read_text(encoding="utf-8")
    options = [word for pair in re.findall(r"`(--[a-z_]+\.[a-z_]+) (\w+)`", page) for word in pair]
    named = ["--module", "longspan.integrations.torchtitan", "--config", "asentmax_nape_420m"]
    config: Any = ConfigManager().parse_args([*named, *options])
    assert (config.training.steps, config.lr_scheduler.warmup_steps) == (1000, 100)


@pytest.mark.parametrize("axis", ["tensor", "context", "pipeline"])
def test_what_would_cut_the_layer_is_refused(axis: str) -> None:
    parallelism = config_registry.softmax_nape_tiny().parallelism  # type: ignore[attr-defined]
    refuse(parallelism)
    with pytest.raises(ValueError, match=f"{axis} parallelism does not reach"):
        refuse(replace(parallelism, **{f"{axis}_parallel_degree": 2}))
    with pytest.raises(ValueError, match="partial_dtensor"):
        refuse(replace(parallelism, spmd_backend="spmd_types"))
    with pytest.raises(ValueError, match="takes no masks"):
        built("softmax", "nape").layers["0"].attention(torch.randn(1, 4, 64), attention_masks=object())


def test_torchtitans_trainer_trains_it_and_we_read_its_checkpoint(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path)
    texts = [path.read_text() for path in sorted((tmp_path / "texts").glob("*.txt"))]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    marks = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    (corpus.folder / "tokenizer_config.json").write_text(json.dumps(marks))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"""--module=longspan.integrations.torchtitan --config=asentmax_nape_tiny --hf_assets_path={corpus.folder}
        --dataloader.dataset_path={tmp_path / "data"} --training.steps=4 --training.local_batch_size=2
        --training.global_batch_size=4 --dump_folder={tmp_path / "out"} --metrics.log_freq=1 --compile.no-enable
        --checkpoint.enable --checkpoint.interval=4 --metrics.disable_color_printing"""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shim = Path(__file__).with_name("titan_on_cpu.py")
    quiet = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, str(shim), *options.split()],
        env={**os.environ, **place, **quiet},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"step: +\d+ +loss: +([\d.]+)", ran.stderr + ran.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.1
    sizes = config_registry.sizes_of("tiny", "asentmax", "nape")
    model = load_checkpoint(tmp_path / "out/checkpoint/step-4", sizes)
    ids = torch.tensor([corpus.tokenizer.encode(texts[0])[:128]])
    loss = torch.nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:])
    assert losses[-1] - 1 < float(loss) < losses[0] - 0.3  # the last loss was logged before the last step
