"""Which implementation of attention runs, and which arguments are refused."""

from collections.abc import Callable

import pytest
import torch
from attention_cases import IMPLEMENTATIONS, Case, attend, attend_with_stats, call_of
from torch import Tensor

from longspan import attention, attention_weights, decode, which_impl
from longspan.functional.scores import Rules, visible_tokens


@pytest.mark.parametrize(
    ("time", "expected"), [(1, "reference"), (2048, "reference"), (2049, "chunked"), (10**6, "chunked")]
)
def test_auto_is_dense_while_the_map_is_small(time: int, expected: str) -> None:
    q = torch.empty(1, 1, time, 8, device="meta")
    assert which_impl(q, q, q) == expected
    assert which_impl(q, q, q, impl="auto", alpha=2.0, causal=False) == expected
    assert which_impl(q[:, :, :1], q, q) == "reference"
    for impl in IMPLEMENTATIONS:
        assert which_impl(q, q, q, impl=impl) == impl


@pytest.mark.parametrize(("query_time", "expected"), [(5, "reference"), (2049, "chunked")])
def test_auto_runs_what_it_says(query_time: int, expected: str) -> None:
    call = call_of(Case(1, 1, 1, query_time, 2049, 2, 2, slopes=(3.0,)), torch.float32)
    with torch.no_grad():
        out, stats = attend_with_stats(call, "auto")
        assert stats.impl == which_impl(call["q"], call["k"], call["v"]) == expected
        assert torch.equal(out, attend(call, expected))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


Q, K = zeros(2, 4, 3, 8), zeros(2, 2, 3, 8)
ERRORS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "q_of_three_dimensions": (lambda: attention(Q[0], K, K), ValueError, r"q must be \(batch, heads, time, dim\)"),
    "v_of_three_dimensions": (lambda: attention(Q, K, K[0]), ValueError, r"v must be .* got shape \(2, 3, 8\)"),
    "integers": (lambda: attention(Q.long(), K.long(), K.long()), TypeError, "floating-point"),
    "two_dtypes": (lambda: attention(Q, K.double(), K), TypeError, "k is torch.float64"),
    "two_devices": (lambda: attention(Q, K, K.to("meta")), TypeError, "v is torch.float32 on meta"),
    "other_batch": (lambda: attention(Q, K[:1], K[:1]), ValueError, "agree in batch and dim"),
    "other_dim": (lambda: attention(Q, zeros(2, 2, 3, 7), K), ValueError, "agree in batch and dim"),
    "other_value_time": (lambda: attention(Q, K, K[:, :, 1:]), ValueError, "agree in batch, heads and time"),
    "other_value_heads": (lambda: attention(Q, K, K[:, 1:]), ValueError, "agree in batch, heads and time"),
    "heads_do_not_divide": (lambda: attention(Q[:, 1:], K, K), ValueError, r"heads of k \(2\) must divide .* \(3\)"),
    "no_key_heads": (lambda: attention(Q, K[:, :0], K[:, :0]), ValueError, r"heads of k \(0\)"),
    "slopes_of_key_heads": (lambda: attention(Q, K, K, slopes=zeros(2)), ValueError, r"slopes must have shape \(4,\)"),
    "scales_of_heads": (lambda: attention(Q, K, K, scales=zeros(4)), ValueError, r"scales must be .* \(2, 4, 3\)"),
    "whole_scales": (
        lambda: attention_weights(Q, K, scales=zeros(2, 4, 3, dtype=torch.long)),
        ValueError,
        "floating-point numbers",
    ),
    "lengths_of_other_batch": (
        lambda: attention(Q, K, K, lengths=torch.tensor([3])),
        ValueError,
        r"lengths must be integers of shape \(2,\)",
    ),
    "fractional_lengths": (lambda: attention(Q, K, K, lengths=zeros(2)), ValueError, "lengths must be integers"),
    "lengths_as_a_mask": (
        lambda: attention(Q, K, K, lengths=torch.tensor([True, False])),
        ValueError,
        "lengths must be integers",
    ),
    "decoding_lengths_as_a_mask": (
        lambda: decode(Q, K, K, lengths=torch.tensor([True, False])),
        ValueError,
        "lengths must be integers",
    ),
    "documents_of_queries": (
        lambda: attention(Q[:, :, 1:], K, K, documents=zeros(2, 2, dtype=torch.long)),
        ValueError,
        r"documents must be integer ids of shape \(2, 3\), one per key",
    ),
    "fractional_documents": (lambda: attention(Q, K, K, documents=zeros(2, 3)), ValueError, "integer ids"),
    "alpha_by_key_head": (
        lambda: attention(Q, K, K, alpha=torch.tensor([1.5, 2.0])),
        ValueError,
        r"alpha must be a number or of shape \(\) or \(4,\), got \(2,\)",
    ),
    "alpha_below_1": (lambda: attention(Q, K, K, alpha=0.5), ValueError, "alpha must be a finite number >= 1"),
    "alpha_below_1_chunked": (lambda: attention(Q, K, K, alpha=0.5, impl="chunked"), ValueError, "finite number >= 1"),
    "alpha_of_nothing": (
        lambda: attention(Q[:, :, :0], K, K, alpha=float("nan")),
        ValueError,
        "alpha must be a finite number >= 1",
    ),
    "unknown_impl": (
        lambda: attention(Q, K, K, impl="flash"),
        ValueError,
        "impl must be 'auto' or one of reference, chunked, triton, got 'flash'",
    ),
    "unknown_impl_asked_about": (lambda: which_impl(Q, K, K, impl=""), ValueError, "impl must be 'auto' or one of"),
    "row_too_large": (lambda: attention_weights(Q, K, rows=[0, 3]), IndexError, "between -3 and 2"),
    "row_too_small": (lambda: attention_weights(Q, K, rows=[-4]), IndexError, "between -3 and 2"),
    "rows_in_two_dimensions": (
        lambda: attention_weights(Q, K, rows=torch.tensor([[0]])),
        IndexError,
        "list of query indices",
    ),
    "rows_as_a_mask": (
        lambda: attention_weights(Q, K, rows=torch.tensor([True, False, True])),
        IndexError,
        "list of query indices",
    ),
    "fractional_rows": (lambda: attention_weights(Q, K, rows=[0.5]), IndexError, "list of query indices"),  # type: ignore[list-item]
    "weights_with_bad_slopes": (lambda: attention_weights(Q, K, slopes=zeros(2)), ValueError, "slopes must have"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_is_wrong(name: str) -> None:
    call, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32], ids=str)
def test_lengths_of_few_bits_are_numbers_like_others(dtype: torch.dtype) -> None:
    """Though the keys are more than the dtype can count, and a query may stand before the first."""
    q, k, lengths = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 300, 8), torch.tensor([100, 2])
    few = lengths.to(dtype)
    assert torch.equal(decode(q, k, k, lengths=few), decode(q, k, k, lengths=lengths))
    for impl in IMPLEMENTATIONS:
        assert torch.equal(attention(k, k, k, lengths=few, impl=impl), attention(k, k, k, lengths=lengths, impl=impl))
    rules = [Rules(1.0, lengths=given) for given in (few, lengths)]
    assert torch.equal(*(visible_tokens(own, 300, 300, 2, k.device) for own in rules))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("packed", [True, False], ids=["documents", "one_document"])
def test_a_length_beyond_the_keys_counts_those_there_are(causal: bool, packed: bool) -> None:
    documents = torch.tensor([[0, 0, 1, 1]]) if packed else None
    plain, padded = (Rules(1.0, causal, None, lengths, documents) for lengths in (None, torch.tensor([900])))
    assert torch.equal(*(visible_tokens(rules, 4, 4, 1, torch.device("cpu")) for rules in (plain, padded)))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)], ids=str)
def test_nobody_is_counted_where_there_is_nobody(shape: tuple[int, int]) -> None:
    rules = Rules(1.0, documents=torch.zeros(shape, dtype=torch.long))
    assert visible_tokens(rules, shape[1], shape[1], shape[0], torch.device("cpu")).shape == shape


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_the_interpreter_is_not_trusted_with_bfloat16() -> None:
    pytest.importorskip("triton")
    q = zeros(1, 1, 2, 8, dtype=torch.bfloat16)
    for attend_somehow in (attention, decode):
        with pytest.raises(ValueError, match="wrong in bfloat16"):
            attend_somehow(q, q, q, impl="triton")
