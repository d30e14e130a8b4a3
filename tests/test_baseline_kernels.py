"""Top-k and stick-breaking attention by kernels against the dense oracle: in the interpreter, or on a GPU."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_kernels import dtypes
from torch import Tensor

from longspan.functional.attention import scaled_queries
from longspan.functional.reference import dense_attention
from longspan.functional.scores import Rules
from longspan.nn import Normalizer, StickBreaking, TopK, build_attention

pytest.importorskip("triton")

ON_GPU = torch.cuda.is_available()


@dataclass(frozen=True)
class Call:
    """Sizes and options of a call of attention."""

    query_time: int = 100
    key_time: int = 100
    heads: int = 2
    kv_heads: int = 1
    dim: int = 16
    value_dim: int = 24
    logits: float = 2.0
    slopes: bool = False
    scales: bool = False
    causal: bool = True
    lengths: tuple[int, ...] | None = None
    documents: int | None = None  # tokens of one
    whole: bool = False  # small whole numbers, so that scores tie exactly


CALLS = {
    "plain": Call(),
    "one_query": Call(query_time=1, key_time=130),
    "one_token": Call(query_time=1, key_time=1),
    "slopes": Call(heads=4, kv_heads=2, slopes=True),
    "scales": Call(scales=True),
    "more_keys": Call(query_time=40, key_time=110),
    "more_queries": Call(query_time=70, key_time=20),
    "lengths": Call(lengths=(70, 0), slopes=True),
    "documents": Call(documents=40, slopes=True),
    "large_scores": Call(logits=60.0),
    "ties": Call(whole=True),
    "wide_heads": Call(query_time=40, key_time=40, dim=136, value_dim=200),
}
SHORT = {name: call for name, call in CALLS.items() if name != "wide_heads"}
BOTH_WAYS = {"not_causal": Call(causal=False, slopes=True, lengths=(60, 100))}


def of_few_and_many(many: int) -> list[tuple[str, int]]:
    """Calls with one place and with many."""
    return [(name, places) for name in ("plain", "ties", "lengths") for places in (1, many)]


def inputs(call: Call, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Tensors that the dtype holds exactly."""
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        if call.whole:
            return torch.randint(-1, 2, shape, generator=draw).to(dtype).to(device)
        return torch.randn(*shape, generator=draw).to(dtype).to(device)

    q = drawn(2, call.heads, call.query_time, call.dim)
    k, v = drawn(2, call.kv_heads, call.key_time, call.dim), drawn(2, call.kv_heads, call.key_time, call.value_dim)
    scales = torch.rand(q.shape[:3], generator=draw).add(0.5).to(device) if call.scales else None
    slopes = torch.linspace(0, 0.5, call.heads, device=device) if call.slopes else None
    lengths = None if call.lengths is None else torch.tensor(call.lengths, device=device)
    documents = None
    if call.documents is not None:
        documents = (torch.arange(call.key_time, device=device) // call.documents).expand(2, -1)
    rules = Rules(call.logits * call.dim**-0.5, call.causal, slopes, lengths, documents)
    return {"q": q, "k": k, "v": v, "scales": scales, "rules": rules}


def in_float64(call: dict[str, Any]) -> dict[str, Any]:
    rules: Rules = call["rules"]
    slopes = None if rules.slopes is None else rules.slopes.detach().double()
    tensors = {name: None if call[name] is None else call[name].detach().double() for name in ("q", "k", "v", "scales")}
    return {**tensors, "rules": replace(rules, slopes=slopes)}


def dense(normalizer: Normalizer, q: Tensor, k: Tensor, v: Tensor, scales: Tensor | None, rules: Rules) -> Tensor:
    return dense_attention(scaled_queries(q, scales), k, v, rules, normalizer)


def leaves(call: dict[str, Any]) -> dict[str, Tensor]:
    """What may have a gradient, asked for."""
    found = {name: call[name] for name in ("q", "k", "v", "scales")} | {"slopes": call["rules"].slopes}
    return {name: tensor.requires_grad_() for name, tensor in found.items() if tensor is not None}


def last_digit_of_scores(call: dict[str, Any]) -> float:
    """Of the largest in float32: what rounding a score once makes of its weight, as a share."""
    q, k = call["q"].detach().double(), call["k"].detach().double()
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * call["rules"].scale
    return torch.finfo(torch.float32).eps * float(scores.abs().max())


def assert_as_close_as_plain_torch(
    call: dict[str, Any], ours: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]
) -> None:
    rounding = 8 * torch.finfo(call["q"].dtype).eps + last_digit_of_scores(call)
    for name, value in exact.items():
        largest = max(float(value.abs().max()), 1.0)
        tolerance = 3 * float((plain[name].double() - value).abs().max()) + rounding * largest
        assert float((ours[name].double() - value).abs().max()) <= tolerance, name


@torch.no_grad()
def check_forward(normalizer: Normalizer, call: dict[str, Any]) -> None:
    ours = normalizer.by_kernels(**call)
    assert ours is not None
    plain, exact = dense(normalizer, **call), dense(normalizer, **in_float64(call))
    assert_as_close_as_plain_torch(call, {"out": ours}, {"out": plain}, {"out": exact})


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_stick_breaking(name: str, dtype: torch.dtype, device: torch.device) -> None:
    check_forward(StickBreaking(), inputs(CALLS[name], dtype, device))


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize(("name", "places"), [*((name, 5) for name in CALLS | BOTH_WAYS), *of_few_and_many(20)])
def test_topk_of_long_rows(
    name: str, places: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longspan.nn.normalizers.on_chip", lambda q, k, v: False)
    check_forward(TopK(k=places), inputs((CALLS | BOTH_WAYS)[name], dtype, device))


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize(("name", "places"), [*((name, 5) for name in SHORT | BOTH_WAYS), *of_few_and_many(300)])
def test_topk_of_short_rows_and_its_gradients(name: str, places: int, dtype: torch.dtype, device: torch.device) -> None:
    normalizer = TopK(k=places)
    call = inputs((SHORT | BOTH_WAYS)[name], dtype, device)

    def results(call: dict[str, Any], by_kernels: bool) -> dict[str, Tensor]:
        asked = leaves(call)
        out = normalizer.by_kernels(**call) if by_kernels else dense(normalizer, **call)
        assert out is not None
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        found = torch.autograd.grad(out, list(asked.values()), upstream)
        return {"out": out.detach(), **dict(zip(asked, found, strict=True))}

    exact, plain, ours = results(in_float64(call), False), results(call, False), results(call, True)
    assert_as_close_as_plain_torch(call, ours, plain, exact)


def test_bounds_of_places_lie_between_scores(device: torch.device) -> None:
    """The backward makes scores again in another order, and those of equal keys may come out a digit higher."""
    from longspan.kernels.short import short_attention

    q = torch.ones(1, 1, 3, 16, device=device)
    k = q * torch.tensor([2.0, 2.0, 2.0], device=device)[:, None]
    _, maximum, _, bounds = short_attention(q, k, q, None, None, None, None, 1.0, 1.0, False, 2)
    low, high, part = bounds.unbind(-1)
    edge = torch.full_like(maximum, 32.0)
    assert (low < edge).all()
    assert (high > edge).all()
    torch.testing.assert_close(part.exp(), torch.full_like(part, 2 / 3))


@given(
    rows=st.lists(st.lists(st.integers(-3, 3), min_size=9, max_size=9), min_size=1, max_size=4),
    places=st.integers(1, 12),
)
def test_scores_that_tie_share_their_places(rows: list[list[int]], places: int) -> None:
    scores = torch.tensor(rows, dtype=torch.float32)
    weights = TopK(k=places)(scores[None, None])[0, 0]
    for row, found in zip(rows, weights.tolist(), strict=True):
        ordered = sorted(row, reverse=True)[:places]
        edge, total = ordered[-1], sum(2.718281828459045**score for score in ordered)
        part = ordered.count(edge) / row.count(edge)
        for score, weight in zip(row, found, strict=True):
            own = 1 if score > edge else part if score == edge else 0
            assert weight == pytest.approx(own * 2.718281828459045**score / total, abs=1e-6)


def test_a_list_that_every_key_changes(device: torch.device) -> None:
    """The further back a key, the higher its score."""
    torch.manual_seed(0)
    k = torch.linspace(4, 0, 200, device=device)[None, None, :, None].expand(1, 1, -1, 16)
    v = torch.randn(1, 1, 200, 80, device=device)
    check_forward(TopK(k=50), {"q": torch.ones_like(k), "k": k, "v": v, "scales": None, "rules": Rules(1.0)})


def test_keys_behind_a_stick_that_is_used_up_are_not_read(device: torch.device) -> None:
    q = torch.ones(1, 1, 200, 16, device=device)
    v = torch.randn_like(q)
    v[:, :, :64] = 1e30  # what is left of a stick, however little, would show
    with torch.no_grad():
        out = StickBreaking().by_kernels(q, q, v, None, Rules(4.0))
    assert out is not None
    assert (out[:, :, 128:].abs() < 10).all()
    assert (out[:, :, 1:64] > 1e29).all()


@pytest.mark.parametrize("method", ["topk", "stick_breaking"])
def test_a_layer_takes_the_kernels(method: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    position = "nope" if method == "stick_breaking" else "nape"
    layer = build_attention(method, dim=32, num_heads=2, position=position).to(device).requires_grad_(False)
    x = torch.randn(2, 150, 32, device=device)
    layer.impl = "reference"
    wanted = layer(x)
    monkeypatch.setattr("longspan.nn.attention.dense_attention", None)
    layer.impl = "triton"
    torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-5)


def test_what_has_no_kernel_is_left_to_the_dense_way(device: torch.device) -> None:
    call = inputs(Call(query_time=300, key_time=300), torch.float32, device)
    assert TopK(fraction=0.5).by_kernels(**call) is None
    assert TopK(k=100).by_kernels(**call) is None
    call["q"].requires_grad_()
    assert TopK(k=10).by_kernels(**call) is None
    assert StickBreaking().by_kernels(**call) is None


@pytest.mark.parametrize("method", ["topk", "stick_breaking", "adaptive_temperature"])
def test_a_layer_that_is_told_to_take_kernels_takes_them_or_says_why_not(method: str, device: torch.device) -> None:
    layer = build_attention(method, dim=16, num_heads=2, position="nope", impl="triton").to(device)
    x = torch.randn(1, 300, 16, device=device)
    with pytest.raises(ValueError, match="has no kernel for it"):
        layer(x)  # with gradients, and rows too long for the chip
    with pytest.raises(ValueError, match="float64"):
        layer.double()(x.double())


def test_the_operators_are_registered_well(device: torch.device) -> None:
    from longspan.kernels.short import short_attention
    from longspan.kernels.stick import stick_attention
    from longspan.kernels.topk import topk_attention

    call = inputs(Call(query_time=40, key_time=40, slopes=True), torch.float32, device)
    arguments = call["q"], call["k"], call["v"], call["rules"].slopes
    torch.library.opcheck(stick_attention, (*arguments, None, None, 0.3), test_utils=FORWARD)
    torch.library.opcheck(topk_attention, (*arguments, None, None, 7, 0.3, True), test_utils=FORWARD)
    asked = tuple(tensor.requires_grad_() for tensor in arguments)
    torch.library.opcheck(short_attention, (*asked, None, None, None, 1.0, 0.3, True, 7))


FORWARD = ("test_schema", "test_faketensor")
