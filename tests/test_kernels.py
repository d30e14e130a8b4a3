"""The Triton kernels against the oracle: in Triton's interpreter on a CPU, compiled on a GPU, by the same tests."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Case, attend, call_of, gradients
from test_attention import SMALL
from torch import Tensor

from longspan import attention, decode, which_impl
from longspan.functional.scores import Rules, fellow_tokens, visible_tokens

pytest.importorskip("triton")

SERVED = {name: case for name, case in SMALL.items() if isinstance(case.alpha, float)} | {
    "several_blocks": Case(batch=1, query_time=70, key_time=70, dim=16, value_dim=16, slopes=(0.5, 0.0), logits=2.0),
    "alpha_1.1": Case(batch=1, query_time=40, key_time=40, dim=16, alpha=1.1, logits=2.0),
    "alpha_1.75": Case(batch=1, query_time=40, key_time=40, dim=16, alpha=1.75, logits=2.0),
    "long_rows": Case(batch=1, heads=2, kv_heads=1, query_time=200, key_time=256, dim=32, value_dim=24, logits=2.0),
    "beyond_the_chip": Case(
        batch=1, heads=2, kv_heads=1, query_time=150, key_time=200, dim=24, value_dim=40, logits=3.0
    ),
    "scales_in_several_blocks": Case(
        batch=2, heads=4, query_time=70, key_time=77, dim=16, slopes=(0.5, 0.0, 0.1, 0.0), logits=2.0, scales=True
    ),
    "scales_beyond_the_chip": Case(batch=1, query_time=150, key_time=200, dim=40, logits=2.0, scales=True),
    "wide_heads": Case(batch=1, query_time=33, key_time=33, dim=128, value_dim=128, logits=2.0),
}


def on(device: torch.device, case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The call in a dtype, with inputs that the dtype holds exactly."""
    call = call_of(case, torch.float64)
    return {
        name: value.detach().to(dtype).to(device).requires_grad_(value.requires_grad)
        if isinstance(value, Tensor) and value.is_floating_point()
        else (value.to(device) if isinstance(value, Tensor) else value)
        for name, value in call.items()
    }


def in_float64(call: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().double().requires_grad_(value.requires_grad)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in call.items()
    }


def results(call: dict[str, Any], impl: str) -> dict[str, Tensor]:
    out = attend(call, impl)
    return {"out": out.detach(), **gradients(out, call)}


def dtypes() -> list[torch.dtype]:
    """bf16 is silently wrong in the interpreter."""
    return [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("name", SERVED)
def test_kernel_is_as_close_to_the_oracle_as_plain_torch(name: str, dtype: torch.dtype, device: torch.device) -> None:
    case = SERVED[name]
    alpha = case.alpha
    if dtype == torch.float16:
        case = replace(case, logits=min(case.logits, 100.0))
    call = on(device, case, dtype)
    exact, plain, ours = (
        results(in_float64(call), "reference"),
        results(call, "reference"),
        results(call, "triton"),
    )
    # The kernel multiplies weights in the dtype of the inputs, plain torch in float32: allow for that rounding.
    rounding = torch.finfo(dtype).eps * (4 if dtype == torch.float32 else 8)
    assert isinstance(alpha, float)
    if alpha > 2:  # an ulp of the threshold moves a small weight by its root
        rounding = 0.1 * rounding**0.5
    for key, value in exact.items():
        size = float(value.abs().max())
        tolerance = 3 * float((plain[key].double() - value).abs().max()) + rounding * max(size, 1.0)
        assert float((ours[key].double() - value).abs().max()) <= tolerance, key


def test_rows_that_see_nothing_are_zero_with_zero_gradients(device: torch.device) -> None:
    call = on(device, SMALL["lengths"], torch.float32)
    found = results(call, "triton")
    assert (found["out"][1] == 0).all()
    assert all((found[key][1] == 0).all() for key in ("q", "k", "v"))


@pytest.mark.parametrize("time", [40, 300], ids=["short", "long"])
def test_a_length_beyond_32_bits_hides_nothing(time: int, device: torch.device) -> None:
    q = torch.randn(2, 1, time, 8, device=device)
    huge = torch.tensor([1 << 32, torch.iinfo(torch.int64).max], device=device)
    whole = attention(q, q, q, lengths=torch.full_like(huge, time), impl="triton")
    assert torch.equal(attention(q, q, q, lengths=huge, impl="triton"), whole)


def test_strided_inputs_and_repeated_calls_give_the_same_bits(device: torch.device) -> None:
    call = on(device, SERVED["several_blocks"], torch.float32)
    strided = dict(call)
    for name in ("q", "k", "v"):
        memory = call[name].detach().transpose(1, 2).contiguous().transpose(1, 2)
        strided[name] = memory.requires_grad_()
    first, again = results(call, "triton"), results(strided, "triton")
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_the_operators_are_registered_well(device: torch.device) -> None:
    from longspan.kernels.short import short_attention

    call = on(device, SERVED["grouped_heads"], torch.float32)
    slopes = torch.rand(6, device=device, requires_grad=True)
    scales = torch.rand(call["q"].shape[:3], device=device, requires_grad=True)
    for factor in (None, scales):
        arguments = (call["q"], call["k"], call["v"], slopes, factor, None, None, 1.5, 0.3, True, 0)
        torch.library.opcheck(short_attention, arguments)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter cannot be compiled")
def test_compiles_whole_and_serves_other_lengths_without_compiling_again(device: torch.device) -> None:
    compiled = torch.compile(lambda q: attention(q, q, q, impl="triton"), fullgraph=True, dynamic=True)
    for time in (40, 41, 77, 130):
        q = torch.randn(2, 4, time, 32, device=device, dtype=torch.bfloat16)
        torch.testing.assert_close(compiled(q), attention(q, q, q, impl="triton"))


def test_a_learnt_alpha_is_refused(device: torch.device) -> None:
    q, alpha = torch.randn(1, 2, 8, 8, device=device), torch.tensor(1.5)
    with pytest.raises(ValueError, match="alpha must be a number"):
        attention(q, q, q, impl="triton", alpha=alpha)
    assert which_impl(q, q, q, alpha=alpha) == "reference"


@pytest.mark.parametrize("alpha", [1 + 1e-9, 1 + 1e-7, 1.00001, 1.0002, 1.001])
@pytest.mark.parametrize(("queries", "keys"), [(40, 40), (2, 1030)], ids=["short", "decoding"])
def test_an_alpha_next_to_1_is_next_to_softmax(alpha: float, queries: int, keys: int, device: torch.device) -> None:
    """A power of 1 / (alpha - 1) of float32 numbers has few digits, or none."""
    q, k, v = (torch.randn(1, 2, time, 16, device=device) for time in (queries, keys, keys))
    exact, statistics = attention(q.double(), k.double(), v.double(), alpha=alpha, return_stats=True)
    torch.testing.assert_close(attention(q, k, v, alpha=alpha, impl="triton").double(), exact, rtol=0, atol=2e-3)
    out, found = attention(q, k, v, alpha=alpha, impl="triton", return_stats=True)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-3)
    for ours, theirs in zip(found[:4], statistics[:4], strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("alpha", [0.5, -1.0, float("inf"), float("nan")])
def test_an_alpha_that_is_none_is_refused(alpha: float, device: torch.device) -> None:
    q = torch.randn(1, 1, 4, 8, device=device)
    with pytest.raises(ValueError, match="alpha must be a finite number >= 1"):
        attention(q, q, q, alpha=alpha, impl="triton")


def test_a_large_alpha_is_decoded_to_the_last_digits(device: torch.device) -> None:
    """At alpha 16 a weight of 0.3 is 1e-8 above its threshold, which float32 does not see next to a maximum of 1."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, time, 16, device=device) for time in (1, 1030, 1030))
    exact = decode(q.double(), k.double(), v.double(), alpha=16.0)
    for found in (
        decode(q, k, v, alpha=16.0),
        decode(q, k, v, alpha=16.0, impl="triton"),
        attention(q, k, v, alpha=16.0, impl="triton"),
    ):
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)


def test_sizes_it_cannot_hold_are_refused(device: torch.device) -> None:
    for shape, dtype, reason in (
        ((1, 1, 8, 264), torch.float32, "256 dims"),
        ((1, 1, 8, 8), torch.float64, "float64"),
    ):
        q = torch.randn(*shape, device=device, dtype=dtype)
        with pytest.raises(ValueError, match=reason):
            attention(q, q, q, impl="triton")


@pytest.mark.parametrize("alpha", [1.5, 64.0])
def test_a_gpu_takes_the_kernel_by_itself(alpha: float, device: torch.device) -> None:
    q = torch.randn(1, 2, 8, 8, device=device)
    assert which_impl(q, q, q, alpha=alpha) == ("triton" if q.is_cuda else "reference")


@pytest.mark.parametrize("causal", [True, False])
def test_counts_of_a_document_are_the_same_compiled(causal: bool, device: torch.device) -> None:
    """Interleaved documents and padding, against a count of every pair."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.cat([torch.randint(0, 3, (2, 200), generator=draw), torch.full((2, 60), -1)], 1).int().to(device)
    seen = torch.ones(260, 260, dtype=torch.bool, device=device)
    pairs = (ids[:, :, None] == ids[:, None, :]) & (seen.tril() if causal else seen)
    wanted = pairs.sum(-1)

    def counts(ids: Tensor) -> Tensor:
        return visible_tokens(Rules(1.0, causal, documents=ids), 260, 260, 2, device)

    assert torch.equal(counts(ids), wanted)
    torch.library.opcheck(fellow_tokens, (ids, causal))

    def logarithms(ids: Tensor) -> Tensor:
        return counts(torch.where(ids < 0, -1, ids)).float().log1p()

    compiled = torch.compile(logarithms, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
    assert torch.allclose(compiled(ids), wanted.float().log1p())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32], ids=str)
def test_padding_is_no_fellow_of_a_document(dtype: torch.dtype, device: torch.device) -> None:
    """With the highest id that the dtype has there is no higher one for the padding."""
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    ids = torch.tensor([[least, most, least, least]], dtype=dtype, device=device)
    rules = Rules(1.0, False, documents=ids, lengths=torch.tensor([2], device=device))
    assert visible_tokens(rules, 4, 4, 1, device)[0, :2].tolist() == [1, 1]
