"""Attention: the reference against loops, chunked against the reference, rows that see nothing, the stats."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import (
    IMPLEMENTATIONS,
    STAT_NAMES,
    Case,
    attend,
    attend_with_stats,
    call_of,
    documents_of,
    gradients,
    learnt,
    map_call_of,
)
from oracles import attend_oracle, attention_map_oracle
from torch import Tensor

from longspan import attention_weights
from longspan.functional import chunked

SMALL = {
    "plain": Case(),
    "one_token": Case(query_time=1, key_time=1),
    "softmax": Case(alpha=1.0),
    "alpha_1.2": Case(alpha=1.2, query_time=7, key_time=7),
    "sparsemax": Case(alpha=2.0),
    "alpha_3": Case(alpha=3.0, query_time=7, key_time=7),
    "learnt_alpha": Case(alpha=(1.5,)),
    "learnt_alpha_above_2": Case(alpha=(2.5,), query_time=7, key_time=7),
    "alpha_by_head": Case(alpha=(1.0, 1.5), slopes=(0.3, 0.1)),
    "alpha_by_head_on_both_sides_of_2": Case(heads=3, kv_heads=1, alpha=(1.25, 2.0, 4.0), query_time=7, key_time=7),
    "grouped_heads": Case(heads=6, kv_heads=2, value_dim=3),
    "one_key_head": Case(batch=1, heads=5, kv_heads=1, dim=3, value_dim=7),
    "fewer_queries_than_keys": Case(query_time=4, key_time=13),
    "more_queries_than_keys": Case(query_time=13, key_time=4, slopes=(0.5, 0.0)),
    "one_query": Case(query_time=1, key_time=17, slopes=(0.2, 2.0)),
    "sees_the_future": Case(causal=False, slopes=(0.3, 0.0)),
    "sees_the_future_of_few_keys": Case(causal=False, query_time=9, key_time=3),
    "lengths": Case(batch=4, lengths=(11, 0, 5, 1)),
    "lengths_beyond_the_end": Case(lengths=(99, 3)),
    "lengths_and_fewer_queries": Case(batch=3, query_time=5, key_time=13, lengths=(13, 9, 7), slopes=(0.5, 0.1)),
    "lengths_and_the_future": Case(batch=3, lengths=(11, 0, 6), causal=False),
    "every_length_0": Case(lengths=(0, 0), alpha=(1.5,), slopes=(0.1, 0.2)),
    "contiguous_documents": Case(documents="contiguous"),
    "interleaved_documents": Case(documents="interleaved", slopes=(0.1, 0.5)),
    "documents_and_fewer_queries": Case(query_time=5, key_time=13, documents="contiguous"),
    "documents_and_one_query": Case(query_time=1, key_time=13, documents="interleaved"),
    "documents_and_more_queries": Case(query_time=13, key_time=5, documents="contiguous", causal=False),
    "documents_and_the_future": Case(documents="interleaved", causal=False),
    "documents_and_lengths": Case(documents="contiguous", lengths=(8, 11), slopes=(0.2, 0.4)),
    "steep_slopes": Case(query_time=23, key_time=23, slopes=(1.0, 8.0), alpha=2.0),
    "negative_slope": Case(slopes=(-0.5, 0.5)),
    "own_scale": Case(scale=2.5, slopes=(0.7, 0.0)),
    "negative_scale": Case(scale=-0.5, slopes=(0.7, 3.0)),
    "scale_0": Case(scale=0.0, slopes=(0.7, 0.0)),
    "scales": Case(scales=True, slopes=(0.7, 0.0)),
    "scales_of_softmax": Case(scales=True, alpha=1.0, scale=0.5),
    "scales_and_fewer_queries": Case(scales=True, heads=6, kv_heads=2, query_time=4, key_time=13, lengths=(13, 11)),
    "extreme_logits": Case(logits=1e4, alpha=(1.5, 3.0), slopes=(0.5, 0.0)),
    "extreme_logits_of_softmax": Case(logits=1e4, alpha=1.0),
    "tiny_logits": Case(logits=1e-8, slopes=(1e-9, 0.0)),
}


@pytest.mark.parametrize("name", SMALL)
def test_reference_equals_loops(name: str, device: torch.device) -> None:
    case = SMALL[name]
    call = call_of(case, device=device)
    alphas = case.alpha if isinstance(case.alpha, tuple) else (case.alpha,)
    q = call["q"].detach()
    expected = attention_map_oracle(
        q * call["scales"].detach()[..., None] if case.scales else q,
        call["k"].detach(),
        alpha=alphas if len(alphas) == case.heads else alphas * case.heads,
        slopes=case.slopes,
        scale=case.scale,
        causal=case.causal,
        lengths=case.lengths,
        documents=None if case.documents is None else documents_of(case).tolist(),
    ).to(device)
    weights = attention_weights(**map_call_of(case, device))
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
    out = attend(call, "reference")
    torch.testing.assert_close(out, attend_oracle(expected, call["v"].detach()), rtol=0, atol=1e-10)


LARGE = {
    "many_blocks": Case(batch=1, query_time=1031, key_time=1031, dim=8, value_dim=3, slopes=(0.0, 0.3)),
    "steep": Case(1, 4, 2, 577, 577, dim=8, alpha=(1.0, 1.2, 1.5, 3.0), slopes=(1.0,) * 4),
    "fewer_queries": Case(query_time=67, key_time=901, dim=8, slopes=(2.0, 0.01), alpha=(1.75,)),
    "more_queries": Case(query_time=901, key_time=67, dim=8, slopes=(2.0, 0.01), alpha=2.0),
    "padded": Case(batch=3, query_time=640, key_time=640, dim=8, slopes=(0.5, 0.05), lengths=(640, 77, 0)),
    "packed": Case(query_time=700, key_time=700, dim=8, slopes=(0.5, 0.0), documents="contiguous", alpha=1.2),
    "packed_queries": Case(query_time=99, key_time=700, dim=8, slopes=(0.5, 0.0), documents="contiguous"),
    "interleaved": Case(query_time=555, key_time=555, dim=8, documents="interleaved", lengths=(555, 400)),
    "future": Case(query_time=600, key_time=530, dim=8, causal=False, slopes=(0.5, 0.0), heads=2, kv_heads=1),
}
# Blocks so small that the shapes of SMALL have several, ragged at the end.
TINY_BLOCKS = {"_MOST_ROWS": 3, "_KEY_BLOCK": 4}


def assert_chunked_equals_reference(call: dict[str, Any]) -> None:
    (expected, expected_stats), (out, stats) = (attend_with_stats(call, impl) for impl in IMPLEMENTATIONS)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for stat in STAT_NAMES:
        torch.testing.assert_close(getattr(stats, stat), getattr(expected_stats, stat), rtol=1e-10, atol=1e-10)
    expected_gradients, found = gradients(expected, call), gradients(out, call)
    for name, gradient in found.items():
        assert bool(gradient.isfinite().all()), name
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("name", SMALL)
def test_chunked_equals_reference_in_tiny_blocks(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant, value in TINY_BLOCKS.items():
        monkeypatch.setattr(chunked, constant, value)
    assert_chunked_equals_reference(call_of(SMALL[name], device=device))


@pytest.mark.parametrize("name", LARGE)
def test_chunked_equals_reference(name: str, device: torch.device) -> None:
    assert_chunked_equals_reference(call_of(LARGE[name], device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("alpha", [1.0, (1.5,), 2.0, (1.5, 3.0)], ids=str)
def test_lower_precision(dtype: torch.dtype, alpha: float | tuple[float, ...], device: torch.device) -> None:
    """In and out in one dtype; chunked is as near to float64 as the reference in that dtype is."""
    case = Case(query_time=70, key_time=90, heads=2, kv_heads=1, alpha=alpha, slopes=(0.5, 0.0))
    low = call_of(case, dtype, device)
    exact = {name: value.detach().double().requires_grad_() for name, value in learnt(low).items()}
    exact_call = low | exact
    eps = torch.finfo(dtype).eps
    truth = attend(exact_call, "reference")
    true_gradients = gradients(truth, exact_call)
    errors = []
    for impl in IMPLEMENTATIONS:
        out, stats = attend_with_stats(low, impl)
        found = gradients(out, low)
        assert out.dtype == dtype
        assert stats.entropy.dtype == torch.float32
        assert all(gradient.dtype == dtype for gradient in found.values())
        pairs = [(out.detach(), truth.detach()), *((found[name], true_gradients[name]) for name in found)]
        # In units of the dtype's resolution at the size of each result.
        errors.append([float((left.double() - right).abs().max() / right.abs().max()) / eps for left, right in pairs])
    for of_reference, of_chunked in zip(*errors, strict=True):
        assert of_chunked <= 2 * of_reference + 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_autocast_changes_nothing(impl: str, dtype: torch.dtype, device: torch.device) -> None:
    """Scores in half precision would be off by 0.1 where they are 30, and the threshold with them."""
    call = call_of(Case(logits=8.0, slopes=(0.3, 0.0)), dtype, device)
    with torch.autocast(device.type, torch.bfloat16):
        cast = attend(call, impl)
    plain = attend(call, impl)
    assert torch.equal(cast, plain)
    found, wanted = gradients(cast, call), gradients(plain, call)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_parameters_keep_their_dtype(impl: str, device: torch.device) -> None:
    """Activations in bfloat16 with slopes and alpha learnt in float32, as in mixed-precision training."""
    case = Case(alpha=(1.5, 3.0), slopes=(0.5, 0.0))
    single = call_of(case, torch.float32, device)
    call = call_of(case, torch.bfloat16, device) | {name: single[name] for name in ("alpha", "slopes")}
    out = attend(call, impl)
    assert out.dtype == torch.bfloat16
    assert {name: gradient.dtype for name, gradient in gradients(out, call).items()} == {
        name: value.dtype for name, value in learnt(call).items()
    }


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_non_contiguous_input(impl: str, device: torch.device) -> None:
    """Heads split from one projection are transposed views."""
    call = call_of(Case(heads=4, slopes=(0.5, 0.0, 1.0, 0.1)), device=device)
    views = {name: call[name].detach().mT.contiguous().mT.requires_grad_() for name in "qkv"}
    views["q"] = call["q"].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    assert not any(view.is_contiguous() for view in views.values())
    expected, out = attend(call, impl), attend(call | views, impl)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    expected_gradients = gradients(expected, call)
    for name, gradient in gradients(out, call | views).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("alpha", [1.0, 1.5, 1.75, 3.0])
def test_nan_stays_in_its_row(impl: str, alpha: float, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound that lets chunked skip keys must not take NaN for small."""
    for constant, value in TINY_BLOCKS.items():
        monkeypatch.setattr(chunked, constant, value)
    call = call_of(Case(1, 2, 2, 23, 23, alpha=alpha, slopes=(5.0, 0.0)), device=device)
    with torch.no_grad():
        clean = attend(call, impl)
        poisoned = call["q"].clone()
        poisoned[0, :, 9] = math.nan
        out = attend(call | {"q": poisoned}, impl)
        assert bool(out[:, :, 9].isnan().all())
        others = [row for row in range(23) if row != 9]
        torch.testing.assert_close(out[:, :, others], clean[:, :, others], rtol=0, atol=1e-12)
        poisoned = call["k"].clone()
        poisoned[0, :, 9] = math.nan
        out = attend(call | {"k": poisoned}, impl)
        assert bool(out[:, :, 9:].isnan().all())
        torch.testing.assert_close(out[:, :, :9], clean[:, :, :9], rtol=0, atol=1e-12)


def test_gradcheck_of_the_reference(device: torch.device) -> None:
    call = call_of(Case(1, 2, 1, 3, 4, 2, 2, alpha=(1.4, 1.6), slopes=(0.3, 0.1), logits=0.5), device=device)
    inputs = learnt(call)
    assert list(inputs) == ["q", "k", "v", "slopes", "alpha"]

    def function(*values: Tensor) -> Tensor:
        return attend(call | dict(zip(inputs, values, strict=True)), "reference")

    assert torch.autograd.gradcheck(function, tuple(inputs.values()))
    assert torch.autograd.gradgradcheck(function, tuple(inputs.values()))


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    # Sends back a constant, which PyTorch's own guard takes for leave to return constants.
    "linear": lambda out: out.sum(),
    "square": lambda out: out.square().sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_chunked_refuses_a_second_derivative(loss: str, device: torch.device) -> None:
    call = call_of(Case(), device=device)

    def penalise_the_gradient(impl: str) -> None:
        value = LOSSES[loss](attend(call, impl))
        (gradient,) = torch.autograd.grad(value, call["q"], create_graph=True)
        (value + gradient.square().sum()).backward()

    penalise_the_gradient("reference")
    with pytest.raises(RuntimeError, match=r"twice|once_differentiable|second derivative"):
        penalise_the_gradient("chunked")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("alpha", [1.0, 1.5, (1.75,), 3.0], ids=str)
def test_rows_that_see_nothing(impl: str, alpha: float | tuple[float, ...], device: torch.device) -> None:
    """A padded query, a whole padded sequence, and queries before the first key."""
    case = Case(batch=3, query_time=9, key_time=6, alpha=alpha, slopes=(0.5, 0.0), lengths=(6, 0, 4))
    call = call_of(case, device=device)
    blind = torch.zeros(3, 9, dtype=torch.bool)
    blind[:, :3] = True  # positions -3 to -1
    blind[1] = True
    blind[2, -2:] = True
    out, stats = attend_with_stats(call, impl)
    seen = stats.support.cpu() > 0
    assert torch.equal(seen, ~blind[:, None].expand_as(seen))
    by_row = out.transpose(1, 2)
    assert bool((by_row[blind] == 0).all())
    assert bool((by_row[~blind] != 0).all())
    found = gradients(out, call)
    assert all(bool(gradient.isfinite().all()) for gradient in found.values())
    assert bool((found["q"].transpose(1, 2)[blind] == 0).all())
    for name in ("k", "v"):
        assert bool((found[name][1] == 0).all())
        assert bool((found[name][2, :, 4:] == 0).all())
    for stat, value in zip(STAT_NAMES, (math.inf, 0, 0, 0), strict=True):
        assert bool((getattr(stats, stat).transpose(1, 2)[blind] == value).all())


EMPTY = {
    "batch": Case(batch=0),
    "batch_with_slopes": Case(batch=0, slopes=(1.0, 0.5)),
    "batch_with_lengths": Case(batch=0, lengths=()),
    "batch_with_documents": Case(batch=0, documents="contiguous"),
    "queries": Case(query_time=0),
    "queries_with_slopes": Case(query_time=0, slopes=(1.0, 0.5)),
    "queries_with_lengths": Case(query_time=0, lengths=(3, 0)),
    "queries_with_documents": Case(query_time=0, documents="contiguous"),
    "keys": Case(key_time=0),
    "keys_with_slopes": Case(key_time=0, slopes=(1.0, 0.5)),
    "keys_with_lengths": Case(key_time=0, lengths=(0, 0)),
    "keys_with_documents": Case(key_time=0, documents="interleaved"),
    "keys_of_the_future": Case(key_time=0, causal=False),
    "time": Case(query_time=0, key_time=0),
    "grouped_time": Case(query_time=0, key_time=0, heads=4, kv_heads=2),
}


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", EMPTY)
def test_zero_size(impl: str, name: str, device: torch.device) -> None:
    case = EMPTY[name]
    call = call_of(case, device=device)
    out, stats = attend_with_stats(call, impl)
    rows = (case.batch, case.heads, case.query_time)
    assert out.shape == (*rows, case.value_dim)
    assert all(getattr(stats, stat).shape == rows for stat in STAT_NAMES)
    assert bool((out == 0).all())
    assert all(bool((gradient == 0).all()) for gradient in gradients(out, call).values())


@pytest.mark.parametrize("name", EMPTY)
def test_zero_size_map(name: str, device: torch.device) -> None:
    case = EMPTY[name]
    weights = attention_weights(**map_call_of(case, device))
    assert weights.shape == (case.batch, case.heads, case.query_time, case.key_time)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, (1.5, 1.8)], ids=str)
def test_stats_describe_the_map(impl: str, alpha: float | tuple[float, ...], device: torch.device) -> None:
    case = Case(query_time=9, key_time=13, alpha=alpha, slopes=(0.5, 0.0))
    call = call_of(case, device=device)
    out, stats = attend_with_stats(call, impl)
    weights = attention_weights(**map_call_of(case, device)).detach()
    assert stats.impl == impl
    assert out.requires_grad
    assert not any(getattr(stats, stat).requires_grad for stat in STAT_NAMES)
    assert torch.equal(stats.support, (weights > 0).sum(-1))
    torch.testing.assert_close(stats.largest, weights.amax(-1), rtol=0, atol=1e-12)
    entropy = -(weights * torch.where(weights > 0, weights, 1).log()).sum(-1)
    torch.testing.assert_close(stats.entropy, entropy, rtol=0, atol=1e-12)
    # With a = alpha - 1 and the score s of the largest weight, tau = a s - largest ** a.
    a = torch.as_tensor(call["alpha"], dtype=torch.float64, device=device).detach().expand(2)[:, None] - 1
    positions, keys = torch.arange(4, 13, device=device)[:, None], torch.arange(13, device=device)
    scores = (call["q"] @ call["k"].mT).detach() / math.sqrt(5)
    scores = scores - call["slopes"].detach()[:, None, None] * (positions - keys).abs()
    best = scores.masked_fill(keys > positions, -math.inf).amax(-1)
    torch.testing.assert_close(stats.tau, a * best - stats.largest**a, rtol=0, atol=1e-12)
