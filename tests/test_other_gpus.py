"""GPUs with less memory on the chip than the kernels are launched for, and with more kinds of it."""

import pytest
import torch
import triton.language as tl
from long_problems import PROBLEMS, topics
from test_decode import Step, summary_of
from test_decode import made as made_step
from test_kernels import dtypes
from test_long_kernels import assert_as_close_as_plain_torch, made

from longspan import attention, decode
from longspan.functional.attention import on_chip
from longspan.kernels import gpus, launches
from longspan.kernels.decode_ops import boxes_at_once
from longspan.kernels.pages import PAGE

WIDE = ("dim_64", "dim_128", "dim_256", "topics_and_slopes")


@pytest.fixture
def less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "is_roomy", lambda device: False)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("name", WIDE)
def test_long_rows_with_less_shared_memory(
    name: str, dtype: torch.dtype, device: torch.device, less_memory: None
) -> None:
    assert_as_close_as_plain_torch(made(PROBLEMS[name], dtype, device))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("length", [1024, 8192])
def test_nothing_is_taken_in_larger_pieces_or_further_ahead(dim: int, length: int, less_memory: None) -> None:
    q = torch.empty(1, 1, length, dim, dtype=torch.bfloat16, device="meta")
    least, most = launches.blocks_of(q, q), launches.blocks_of_hopper(q, q)
    assert (least.rows, least.keys) == (most.rows, most.keys)  # the lists of the forward are the backward's
    for name in ("survey", "collect", "solve", "output", "output_alone", "query", "key"):
        mine, theirs = getattr(least, name), getattr(most, name)
        assert mine.part <= theirs.part
        assert mine.stages <= min(theirs.stages, 2)


def test_rows_of_float32_are_short_up_to_half_as_many_keys(less_memory: None) -> None:
    def longest(dim: int, dtype: torch.dtype) -> int:
        rows = (torch.empty(1, 1, keys, dim, dtype=dtype) for keys in range(300))
        return max((row.shape[2] for row in rows if on_chip(row, row, row)), default=0)

    assert [longest(dim, torch.float32) for dim in (32, 64)] == [128, 64]
    assert [longest(dim, torch.float16) for dim in (32, 64)] == [256, 128]


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("time", [60, 300])
def test_maxima_are_the_same_where_products_have_a_memory_of_their_own(
    time: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler's part of it is `other_gpus.py`."""
    q, k, v = torch.randn(3, 1, 2, time, 16, device=device).to(dtype)
    slopes = torch.tensor([0.5, 0.0], device=device)
    wanted = attention(q, k, v, slopes=slopes, impl="triton")
    monkeypatch.setattr(gpus, "TENSOR_MEMORY", tl.constexpr(True))
    assert torch.equal(attention(q, k, v, slopes=slopes, impl="triton"), wanted)


def test_heads_that_do_not_fit_are_left_to_others(less_memory: None, device: torch.device) -> None:
    q = torch.randn(1, 1, 4, 136, device=device)
    for call in (attention, decode):
        with pytest.raises(ValueError, match="heads of 136 dims in float32 do not fit the shared memory of this GPU"):
            call(q, q, q, impl="triton")
        call(q, q, q)
        call(q.half(), q.half(), q.half(), impl="triton")


def test_boxes_of_fewer_pages_at_once_change_no_bit(less_memory: None, device: torch.device) -> None:
    call = made_step(Step(heads=1, content=topics(PAGE), room=70 * PAGE), torch.float32, device)
    assert boxes_at_once(device) == 32
    known = decode(**call, summary=summary_of(call, boxes=True), impl="triton")
    assert torch.equal(known, decode(**call, impl="triton"))
