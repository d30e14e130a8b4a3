"""The decoder: what any transformer of this kind must satisfy, and that its config reaches its parts."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from longspan.nn import (
    METHODS,
    POSITIONS,
    Adaptive,
    Attention,
    Entmax,
    RoPE,
    Scalable,
    SSMax,
    TopK,
    exponential_slopes,
    linear_slopes,
)
from longspan.nn.decoder import AttentionConfig, Block, Decoder, DecoderConfig, attention_of
from longspan.nn.embedding import LookUp
from longspan.nn.norm import HeadNorm
from longspan.paper.recipes import recipe

Kind = TypeVar("Kind", bound=nn.Module)

VOCABULARY, TIME = 13, 21
CELLS = [pytest.param(method, position, id=f"{method}-{position}") for method, position in product(METHODS, POSITIONS)]


def small(method: str = "asentmax", position: str = "nape", **options: object) -> DecoderConfig:
    attention = AttentionConfig(method=method, position=position, **options)  # type: ignore[arg-type]
    return DecoderConfig(VOCABULARY, layers=2, dim=24, hidden=40, heads=4, attention=attention)


def model(config: DecoderConfig) -> Decoder:
    """In float64 and away from the start, so that every part matters."""
    torch.manual_seed(0)
    built = Decoder(config).double()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return built


def tokens(batch: int = 3, time: int = TIME, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("method", "position"), CELLS)
def test_every_method_runs_is_causal_and_equals_itself_with_caches(method: str, position: str) -> None:
    decoder, read = model(small(method, position)), tokens()
    with torch.no_grad():
        full = decoder(read)
        assert full.shape == (3, TIME, VOCABULARY)
        assert full.isfinite().all()

        changed = read.clone()
        changed[:, 12:] = (changed[:, 12:] + 1) % VOCABULARY
        after = decoder(changed)
        torch.testing.assert_close(after[:, :12], full[:, :12], rtol=0, atol=1e-12)
        assert not torch.allclose(after[:, 12:], full[:, 12:])

        caches = decoder.new_caches()
        pieces = [decoder(piece, caches=caches) for piece in read.split([9, 1, 1, 3, TIME - 14], dim=1)]
        assert [len(cache) for cache in caches] == [TIME, TIME]
        torch.testing.assert_close(torch.cat(pieces, dim=1), full, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("method", "position"), CELLS)
def test_gradients_reach_every_parameter(method: str, position: str) -> None:
    decoder = model(small(method, position))
    decoder(tokens()).logsumexp(-1).sum().backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several threads cut products of different shapes differently, and round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_only_some_columns_are_the_columns_of_all() -> None:
    decoder, read = model(small()), tokens()
    only = torch.tensor([2, 3, 20])
    torch.testing.assert_close(decoder(read, only=only), decoder(read)[:, only], rtol=0, atol=0)


@pytest.mark.parametrize("position", ["nope", "alibi", "nape", "rope"])
@pytest.mark.parametrize("method", ["softmax", "asentmax", "topk", "stick_breaking"])
def test_a_last_block_for_the_last_tokens_alone_is_that_of_all(method: str, position: str) -> None:
    """Its logits, and the gradients of every parameter."""
    decoder, read = model(small(method=method, position=position)), tokens()
    only = torch.tensor([TIME - 7, TIME - 6, TIME - 2])
    results = []
    for options in ({}, {"last": 8}, {"last": TIME}):
        logits = decoder(read, only=only, **options)
        weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
        results.append([logits, *torch.autograd.grad((logits * weights).sum(), tuple(decoder.parameters()))])
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=0, atol=1e-10)


def test_the_last_tokens_with_padding_documents_and_a_cache() -> None:
    decoder, read = model(small()), tokens()
    documents = (torch.arange(TIME) >= 9).long().expand_as(read)
    for options in ({"documents": documents}, {"lengths": torch.tensor([TIME, TIME - 3, 4])}):
        torch.testing.assert_close(
            decoder(read, last=5, **options), decoder(read, **options)[:, -5:], rtol=0, atol=1e-12
        )
    caches = decoder.new_caches()
    for part, wanted in zip(read.split([9, TIME - 9], dim=1), decoder(read).split([9, TIME - 9], dim=1), strict=True):
        torch.testing.assert_close(decoder(part, caches=caches, last=3), wanted[:, -3:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("last", [0, TIME + 1])
def test_more_last_tokens_than_there_are_is_an_error(last: int) -> None:
    with pytest.raises(ValueError, match=f"last must be from 1 to the {TIME} tokens there are, got {last}"):
        model(small())(tokens(), last=last)


def test_padding_and_documents_reach_the_attention() -> None:
    decoder, read = model(small()), tokens(batch=1)
    padded = decoder(read, lengths=torch.tensor([15]))
    torch.testing.assert_close(padded[:, :15], decoder(read[:, :15]), rtol=0, atol=1e-12)
    documents = (torch.arange(TIME) >= 9).long()[None]
    packed = decoder(read, documents=documents)
    torch.testing.assert_close(packed[:, 9:], decoder(read[:, 9:]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("method", "counts"), [("asentmax", 1), ("entmax", 0)])
def test_what_a_token_sees_of_its_document_is_counted_once(method: str, counts: int) -> None:
    decoder, read = model(small(method)), tokens()
    documents = (torch.arange(TIME) >= 9).long().expand_as(read)
    with profile() as seen:
        decoder(read, documents=documents)
    assert sum(event.name == "longspan::fellow_tokens" for event in seen.events() or ()) == counts


def test_documents_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="documents must be integer ids of shape"):
        model(small())(tokens(), documents=torch.zeros(3, TIME - 1, dtype=torch.int64))


def test_caches_of_another_depth_are_refused() -> None:
    decoder = model(small())
    with pytest.raises(ValueError, match="shorter"):
        decoder(tokens(), caches=decoder.new_caches()[:1])


def test_the_block_is_gemmas() -> None:
    config = small("softmax", "nope")
    decoder, read = model(config), tokens()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * weight

    x = decoder.embed.weight[read] * math.sqrt(config.dim)
    for block in decoder.blocks:
        assert isinstance(block, Block)
        attended = block.attention(norm(x, block.before_attention.weight))
        x = x + norm(attended, block.after_attention.weight)
        h = norm(x, block.before_mlp.weight)
        gated = nn.functional.gelu(h @ block.gate.weight.T, approximate="tanh") * (h @ block.up.weight.T)
        x = x + norm(gated @ block.down.weight.T, block.after_mlp.weight)
    torch.testing.assert_close(decoder(read), norm(x, decoder.norm.weight) @ decoder.output.weight.T)


# 2 V D + D + L (4 D + 4 D^2 + 3 D F); adaptive scalers add 2 L (D + 1) H.
@pytest.mark.parametrize(
    ("task", "softmax", "asentmax"),
    [
        ("2back", 1_321_216, 1_329_440),
        ("local_count", 800_384, 806_576),
        ("flip_flop_sparse", 2_629_888, 2_646_336),
        ("flip_flop_dense", 2_629_888, 2_646_336),
        ("copy", 2_117_376, 2_133_824),
        ("reverse", 3_956_480, 3_981_152),
        ("mqmtar", 10_762_752, 10_828_416),
        ("sort", 2_117_376, 2_125_600),
    ],
)
def test_parameters_at_the_papers_sizes(task: str, softmax: int, asentmax: int) -> None:
    for method, count in {"softmax": softmax, "asentmax": asentmax}.items():
        with torch.device("meta"):
            decoder = Decoder(recipe(f"paper/{task}/nape/{method}").model)
        assert sum(parameter.numel() for parameter in decoder.parameters()) == count


def test_the_start() -> None:
    torch.manual_seed(0)
    config = replace(small(initial_beta=None, qk_norm=True), vocabulary=500, dim=128, hidden=256)
    decoder = Decoder(config).requires_grad_(False)
    for name, parameter in decoder.named_parameters():
        if "norm" in name or "before" in name or "after" in name:
            assert (parameter == 1).all(), name
        elif "scaler" in name:
            assert parameter.abs().max() <= 1 / math.sqrt(128), name  # torch's own linear start
        else:
            assert abs(float(parameter.mean())) < 5e-4, name
            assert float(parameter.std()) == pytest.approx(0.02, rel=0.03), name
    logits = decoder(torch.arange(500).view(5, 100))
    assert float(logits.std()) == pytest.approx(0.02 * math.sqrt(128), rel=0.05)  # near uniform: 0.23


def _attention(**options: object) -> Attention:
    return attention_of(AttentionConfig(**options), 32, 4)  # type: ignore[arg-type]


def _scaler(**options: object) -> Adaptive:
    scaler = _attention(**options).scaler
    assert isinstance(scaler, Adaptive)
    return scaler


def _per_head(method: str, **options: object) -> SSMax | Scalable:
    scaler = _attention(method=method, **options).scaler
    assert isinstance(scaler, SSMax | Scalable)
    return scaler


def _start(name: str, initial_beta: float | None = None, initial_gamma: float = 0.0) -> set[float]:
    """Where SEntmax's heads start."""
    scaler = _per_head("sentmax", initial_beta=initial_beta, initial_gamma=initial_gamma)
    return set(getattr(scaler, name).tolist())


def _slopes(**options: object) -> list[float]:
    slopes = _attention(**options).position.slopes
    assert slopes is not None
    return slopes.tolist()


def _rope(**options: object) -> RoPE:
    position = _attention(position="rope", **options).position
    assert isinstance(position, RoPE)
    return position


def _head_norm(**options: object) -> HeadNorm:
    norm = _attention(qk_norm=True, **options).key_norm
    assert isinstance(norm, HeadNorm)
    return norm


def _gamma(scaler: Adaptive) -> torch.Tensor:
    assert isinstance(scaler.gamma, nn.Linear)
    return scaler.gamma_range * scaler.gamma(torch.randn(32)).tanh()[0].detach()


OPTIONS: dict[str, Callable[[], bool]] = {
    "alpha": lambda: _normalizer(Entmax, method="entmax", alpha=1.75).fixed == 1.75,
    "alpha-learned": lambda: _normalizer(Entmax, method="sentmax", alpha="learned").logit is not None,
    "top_k": lambda: _normalizer(TopK, method="topk", top_k=7).k == 7,
    "top_fraction": lambda: _normalizer(TopK, method="topk", top_fraction=0.25).fraction == 0.25,
    "delta": lambda: _scaler(delta=0.5).delta == 0.5,
    "delta-assmax": lambda: _scaler(method="assmax", delta=0.5).delta == 0.5,
    "delta-sentmax": lambda: _per_head("sentmax", delta=0.5).delta == 0.5,
    "delta-ssmax": lambda: _per_head("ssmax", delta=0.5).delta == 0,
    "initial_beta-sentmax": lambda: _start("beta", 0.25) == {0.25},
    "initial_beta-sentmax-none": lambda: len(_start("beta")) == 4,
    "initial_gamma-sentmax": lambda: _start("gamma", 0.25, 1.5) == {1.5},
    "gamma_range": lambda: _scaler(gamma_range=3.0).gamma_range == 3.0,
    "initial_beta-safe": lambda: not _scaler(initial_beta=0.05).beta.weight.any(),
    "initial_beta-none": lambda: bool(_scaler(initial_beta=None).beta.weight.all()),
    "initial_gamma": lambda: abs(float(_gamma(_scaler(initial_gamma=1.0))) - 1) < 1e-6,
    "slopes-linear": lambda: _slopes(position="alibi") == linear_slopes(4).tolist(),
    "slopes-exponential": lambda: _slopes(position="alibi", slopes="exponential") == exponential_slopes(4).tolist(),
    "slopes-nape": lambda: _slopes(slopes="exponential") == [*exponential_slopes(2).tolist(), 0, 0],
    "slope_factor": lambda: _slopes(slope_factor=0.25) == [0.25, 0.125, 0, 0],
    "rope_base": lambda: _rope(rope_base=500.0).base == 500.0,
    "rope_factor-none": lambda: _rope().scaling is None,
    "rope_factor": lambda: _rope(rope_factor=16.0, rope_original_length=128).scaling == (16.0, 128, 1.0, 4.0),
    "qk_norm": lambda: isinstance(_attention(qk_norm=True).query_norm, nn.RMSNorm),
    "qk_gain": lambda: set(_head_norm(qk_gain=0.5).weight.tolist()) == {0.5},
    "qk_noise": lambda: _head_norm(qk_noise=0.25).noise == 0.25,
    "qk_norm-off": lambda: isinstance(_attention().key_norm, nn.Identity),
}


def _normalizer(kind: type[Kind], **options: object) -> Kind:
    normalizer = _attention(**options).normalizer
    assert isinstance(normalizer, kind)
    return normalizer


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_reaches_its_part(option: str) -> None:
    assert OPTIONS[option]()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "hardmax"}, "unknown method 'hardmax'"),
        ({"position": "sinus"}, "unknown position 'sinus'"),
        ({"alpha": 0.5}, "alpha must be between"),
        ({"method": "topk", "top_k": 0}, "at least 1"),
        ({"initial_beta": 0.0}, "initial_beta must be positive"),
        ({"initial_gamma": 2.0}, "initial_gamma must be within"),
        ({"qk_noise": 0.5}, "needs qk_norm"),
        ({"slope_factor": 0.0}, "slope_factor must be positive"),
        ({"qk_noise_layers": -1}, "qk_noise_layers must not be negative"),
    ],
    ids=["method", "position", "alpha", "top_k", "initial_beta", "initial_gamma", "qk_noise", "slopes", "layers"],
)
def test_a_wrong_option_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _attention(**options)


@pytest.mark.parametrize(("heads_with_noise", "quiet"), [("scaled", 2), ("all", 0)])
def test_noise_is_for_training_and_for_the_heads_named(heads_with_noise: str, quiet: int) -> None:
    norm = _head_norm(qk_noise=0.5, qk_gain=2.0, qk_noise_on=heads_with_noise)  # NAPE scales the last two of four heads
    heads = torch.randn(3, 4, 200, 8)
    clean = norm.eval()(heads)
    torch.testing.assert_close(clean.square().mean(-1).sqrt(), torch.full((3, 4, 200), 2.0), rtol=1e-4, atol=0)
    noise = (norm.train()(heads) - clean).detach()
    assert not noise[:, :quiet].any()
    for head in range(quiet, 4):
        assert float(noise[:, head].std()) == pytest.approx(0.5 * 2.0, rel=0.05)


def test_noise_may_be_in_the_first_layers_alone() -> None:
    for layers, expected in ((None, [0.5, 0.5, 0.5]), (1, [0.5, 0.0, 0.0]), (0, [0.0, 0.0, 0.0])):
        attention = AttentionConfig(qk_norm=True, qk_noise=0.5, qk_noise_layers=layers)
        model = Decoder(DecoderConfig(7, layers=3, dim=16, hidden=16, heads=2, attention=attention))
        norms = [module for module in model.modules() if isinstance(module, HeadNorm)]
        assert [norm.noise for norm in norms[::2]] == [norm.noise for norm in norms[1::2]] == expected


def test_the_gradient_of_an_embedding_by_a_product_is_that_of_a_sum_over_tokens() -> None:
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    read = torch.tensor([[4, 0, 0, 2], [1, 0, 4, 4]])  # 3 is not read
    gradient = torch.randn(2, 4, 3, dtype=torch.float64)
    by_product, by_sum = LookUp.apply(read, weight), nn.functional.embedding(read, weight)
    assert torch.equal(by_product, by_sum)
    (found,), (expected,) = (torch.autograd.grad(out, weight, gradient) for out in (by_product, by_sum))
    torch.testing.assert_close(found, expected)
    assert not found[3].any()


def test_a_compiled_embedding_under_autocast_has_gradients_in_full_precision() -> None:
    weight = torch.randn(5, 3, requires_grad=True)
    read, gradient = torch.randint(0, 5, (2, 40)), torch.randn(2, 40, 3)
    looked_up = torch.compile(LookUp.apply, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        compiled, plain = looked_up(read, weight), nn.functional.embedding(read, weight)
    (found,), (expected,) = (torch.autograd.grad(out, weight, gradient) for out in (compiled, plain))
    torch.testing.assert_close(found, expected)
