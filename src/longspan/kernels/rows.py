"""Row-wise entmax: a row is read once, solved on the chip and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.kernels.operators import operator
from longspan.kernels.solver import gains, heights, kind_of, powers_of, row_maximum

LONGEST = 1 << 14  # scores of a row that registers hold
LOWEST = 1.05  # alpha: nearer to 1 the powers of heights lose more digits than the solver in plain torch does


@triton.jit(do_not_specialize=["ROWS", "N"])
def rows_kernel(Scores, Weights, a, r, ROWS, N, KIND: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr):
    rows, columns = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, BLOCK)
    place = rows.to(tl.int64)[:, None] * N + columns[None, :]
    there = (rows[:, None] < ROWS) & (columns[None, :] < N)
    scores = tl.load(Scores + place, mask=there, other=float("-inf"))
    # A row with NaN or +inf has no weights.
    bad = (scores != scores) | (scores == float("inf"))
    spoilt = tl.sum(tl.where(bad, float("nan"), 0.0), 1)
    scores = tl.where(bad, 0.0, scores)
    gap = (scores - row_maximum(scores)[:, None]) * a
    height = heights(gap, r, KIND, "tf32")
    u = tl.maximum(gap + height[:, None], 0.0)
    gain = gains(u, r, KIND)
    # The last step on every u, in its own resolution: thousands of small weights would share an ulp of the height.
    fall = (tl.sum(gain * u, 1) - 1.0) * a / tl.maximum(tl.sum(gain, 1), 1e-30)
    u = tl.where(u > 0, tl.maximum(u - fall[:, None], 0.0), 0.0)
    tl.store(Weights + place, gains(u, r, KIND) * u + spoilt[:, None], mask=there)


@operator("entmax_rows")
def entmax_rows(scores: Tensor, alpha: float) -> Tensor:
    """The weights of every row of float32 scores, LOWEST <= alpha <= 2; not differentiable by itself."""
    scores = scores.contiguous()
    weights = torch.empty_like(scores)
    length = scores.shape[-1]
    rows = scores.numel() // length
    block = max(16, triton.next_power_of_2(length))
    at_once = max(1, 1024 // block)
    rows_kernel[(triton.cdiv(rows, at_once),)](
        scores, weights, *powers_of(alpha), rows, length,
        KIND=kind_of(alpha, fine=True), M=at_once, BLOCK=block, num_warps=min(16, max(1, block * at_once // 512)),
    )  # fmt: skip
    return weights


@entmax_rows.register_fake
def _(scores: Tensor, alpha: float) -> Tensor:
    return torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)


def serves(scores: Tensor, alpha: float) -> bool:
    """Whether the kernel takes such rows."""
    return scores.dtype == torch.float32 and LOWEST <= alpha <= 2 and 0 < scores.shape[-1] <= LONGEST
