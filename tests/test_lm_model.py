"""The LLaMA-style decoder: sizes, packed documents, the cache, and another base for RoPE."""

import math
from pathlib import Path

import pytest
import torch
from tiny_text import tiny_corpus
from torch import Tensor

from longspan.nn.decoder import AttentionConfig
from longspan.nn.generate import generate
from longspan.nn.llama import PRESETS, Llama, parameter_count, preset, rebase
from longspan.nn.positions import NAPE
from longspan.text.packing import window

METHODS = ("softmax", "ssmax", "entmax", "asentmax")
POSITIONS = ("nape", "rope")


def model(method: str, position: str = "nape", vocabulary: int = 50, seed: int = 0) -> Llama:
    """A tiny model with weights large enough for attention to choose."""
    torch.manual_seed(seed)
    attention = AttentionConfig(method=method, position=position, slopes="exponential")
    built = Llama(preset("tiny", vocabulary, attention)).double()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return built


@pytest.mark.parametrize(
    ("name", "millions"), [("420m", 423.5), ("120m", 122.7), ("50m", 50.9), ("10m", 10.5), ("tiny", 0.37)]
)
def test_a_preset_has_the_parameters_in_its_name(name: str, millions: float) -> None:
    config = preset(name)
    assert parameter_count(config) / 1e6 == pytest.approx(millions, rel=5e-3)
    with torch.device("meta"):
        built = Llama(config)
    counted = sum(parameter.numel() for key, parameter in built.named_parameters() if ".scaler." not in key)
    assert counted == parameter_count(config)
    assert sum(parameter.numel() for parameter in built.parameters()) < 1.05 * counted


def test_the_scaling_law_model_is_the_papers() -> None:
    config = preset("120m", 50_257)
    assert parameter_count(config) - 50_257 * 768 == pytest.approx(123.5e6, rel=2e-3)


def test_the_420m_preset_is_the_papers() -> None:
    config = preset("420m")
    assert (config.layers, config.dim, config.heads) == (24, 768, 12)
    slopes = next(part.slopes for part in Llama(preset("tiny")).modules() if isinstance(part, NAPE))
    assert slopes is not None
    assert slopes.tolist() == [2**-4, 2**-8, 0, 0]  # exponential on half of the heads
    with pytest.raises(ValueError, match="there are 420m, 120m"):
        preset("1b")
    assert set(PRESETS) == {"420m", "120m", "50m", "10m", "tiny"}


def test_no_parameter_is_a_bias_but_a_scalers() -> None:
    names = [name for name, parameter in Llama(preset("tiny")).named_parameters() if name.endswith("bias")]
    assert all(".scaler." in name for name in names)


def test_the_decoder_is_what_its_equations_say() -> None:
    """Softmax without positions, written out."""
    llama = model("softmax", "nope")
    tokens = torch.randint(50, (2, 11), generator=torch.Generator().manual_seed(1))
    weights = dict(llama.named_parameters())

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]

    def through(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T

    x = weights["embed.weight"][tokens]
    future = torch.ones(11, 11, dtype=torch.bool).triu(1)
    for block in ("blocks.0", "blocks.1"):
        h = norm(x, f"{block}.before_attention")
        q, k, v = (through(h, f"{block}.attention.{name}").view(2, 11, 4, 16) for name in ("query", "key", "value"))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4
        p = scores.masked_fill(future, -torch.inf).softmax(-1)
        x = x + through(torch.einsum("bhij,bjhd->bihd", p, v).flatten(2), f"{block}.attention.output")
        h = norm(x, f"{block}.before_mlp")
        gate = through(h, f"{block}.gate")
        x = x + through(gate * gate.sigmoid() * through(h, f"{block}.up"), f"{block}.down")
    expected = through(norm(x, "norm"), "output")
    assert torch.allclose(llama(tokens), expected, atol=1e-9)
    assert torch.allclose(llama(tokens, only=torch.tensor([3, 10])), expected[:, [3, 10]], atol=1e-9)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("method", METHODS)
def test_packed_documents_are_separate_documents(tmp_path: Path, method: str, position: str) -> None:
    corpus = tiny_corpus(tmp_path)
    stream = corpus.split("validation")
    first, second = stream.document(0), stream.document(1)
    decoder = model(method, position, corpus.tokenizer.vocabulary)
    batch = window(stream, 0, len(first) + len(second))
    with torch.no_grad():
        packed = decoder(batch.tokens, documents=batch.documents)[0]
        alone = torch.cat([decoder(document[None])[0] for document in (first, second)])
        joined = decoder(batch.tokens)[0]
    assert torch.allclose(packed, alone, atol=1e-9)
    assert torch.allclose(joined[: len(first)], alone[: len(first)], atol=1e-9)
    assert not torch.allclose(joined, alone, atol=1e-3)
    ends = [len(first) - 1, len(first) + len(second) - 1]
    assert (~batch.mask[0]).nonzero().squeeze(1).tolist() == ends
    counted = torch.cat([document[1:] for document in (first, second)])
    assert torch.equal(batch.targets[0][batch.mask[0]], counted)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("method", METHODS)
def test_generation_with_a_cache_is_generation_without(method: str, position: str) -> None:
    decoder = model(method, position)
    prompt = torch.randint(50, (3, 9), generator=torch.Generator().manual_seed(1))
    tokens = prompt
    for _ in range(12):
        tokens = torch.cat([tokens, decoder(tokens)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generate(decoder, prompt, 12), tokens)


def test_another_base_is_that_of_a_model_built_with_it() -> None:
    tokens = torch.randint(50, (1, 40), generator=torch.Generator().manual_seed(1))
    decoder = model("asentmax", "rope")
    before = decoder(tokens)
    moved = rebase(decoder, 500_000.0)
    other = AttentionConfig(method="asentmax", position="rope", slopes="exponential", rope_base=500_000.0)
    assert moved.config.attention == other
    built = Llama(moved.config).double()
    built.load_state_dict(moved.state_dict())
    assert torch.allclose(moved(tokens), built(tokens))
    assert not torch.allclose(moved(tokens), before)
    with pytest.raises(ValueError, match="only RoPE has a base"):
        rebase(model("asentmax", "nape"), 500_000.0)


@pytest.mark.parametrize("base", [0.0, -5.0, 1.0, math.inf, math.nan])
def test_a_base_that_turns_nothing_is_refused(base: float) -> None:
    with pytest.raises(ValueError, match="base of RoPE must be more than 1"):
        rebase(model("asentmax", "rope"), base)
