"""Exact entmax attention in memory linear in the length, forward and backward, in plain PyTorch.

One head and one block of queries at a time: the block's scores are made, solved and dropped. What is kept of a row for
the backward are its weights and their keys where those are few (`survivors`), else its anchor, from which the backward
rebuilds the weights. Keys that no query of the block can keep are never touched: those of the future and, in a head
with ALiBi and alpha > 1, those so far back that

    scale |q_i| max_j |k_j| - slope * distance  <=  score(i, i) - 1 / (alpha - 1),

because the row's maximum is at least score(i, i), and nothing 1 / (alpha - 1) or more below the maximum survives.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.functional.entmax import entmax_vjp
from longspan.functional.scores import Rules, query_positions, score_block, without_autocast
from longspan.functional.survivors import spread, survivors, weighted_sum, weighted_sum_vjp
from longspan.functional.threshold import Alpha, AlphaRange, Anchor, alpha_range, solve, tau_of, weights

_SCORES_AT_ONCE = {"cpu": 1 << 21, "cuda": 1 << 26}  # near a CPU's cache; a GPU wants more work at once
_MOST_ROWS = 512
_KEY_BLOCK = 64
_ROUNDING = 1.001  # on |q| |k|: far above the rounding of a float32 dot product


class RowStats(NamedTuple):
    """Per query row, each (batch, heads, time)."""

    tau: Tensor
    support: Tensor
    entropy: Tensor
    largest: Tensor


class _Block(NamedTuple):
    head: int
    kv_head: int
    rows: slice  # of the queries
    keys: slice
    slope: float
    positions: Tensor  # of those queries among the keys
    key_positions: Tensor


def chunked_attention(
    q: Tensor, k: Tensor, v: Tensor, rules: Rules, alpha: Alpha, with_stats: bool
) -> tuple[Tensor, RowStats | None]:
    """The output and, if asked for, the statistics of every row."""
    bounds = alpha_range(alpha)
    with without_autocast(q.device):
        out, *stats = _Chunked.apply(q, k, v, rules.slopes, alpha, rules, bounds, with_stats)
    return out, RowStats(*stats) if with_stats else None


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor | None,
        alpha: Alpha,
        rules: Rules,
        bounds: AlphaRange,
        with_stats: bool,
    ) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        batch, num_heads, time, _ = q.shape
        out = q.new_zeros((batch, num_heads, time, v.shape[-1]))
        anchors = Anchor(*(q.new_zeros((batch, num_heads, time), dtype=dtype) for _ in range(2)))
        stats = empty_stats(anchors.score) if with_stats else ()
        ctx.blocks = []
        kept: list[Tensor] = []
        learns = any(ctx.needs_input_grad)
        for block in _blocks(q, k, rules, alpha):
            head, rows = block.head, block.rows
            head_alpha = _alpha_of(alpha, block, num_heads, dtype)
            scores = _block_scores(q, k, rules, block, dtype)  # (B, rows, keys)
            few = survivors(scores, head_alpha, bounds)
            if few is not None:
                scores = few.scores  # (B, rows, few)
            anchor = solve(scores, head_alpha, bounds)
            p = weights(scores, head_alpha, anchor, bounds)
            values = v[:, block.kv_head, block.keys].to(dtype)
            out[:, head, rows] = p @ values if few is None else weighted_sum(p, few.keys, values)
            anchors.score[:, head, rows] = anchor.score.squeeze(-1)
            anchors.weight[:, head, rows] = anchor.weight.squeeze(-1)
            if learns:
                ctx.blocks.append((block, None if few is None else len(kept)))
                kept += [] if few is None else [p, few.keys.int()]
            if with_stats:
                for stat, value in zip(stats, _row_stats(p, scores, anchor, head_alpha), strict=True):
                    stat[:, head, rows] = value
        ctx.save_for_backward(q, k, v, slopes, alpha if isinstance(alpha, Tensor) else None, *anchors, *kept)
        ctx.alpha, ctx.rules, ctx.bounds = (None if isinstance(alpha, Tensor) else alpha), rules, bounds
        ctx.mark_non_differentiable(*stats)
        return out, *stats

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError('impl="chunked" has no second derivative; use impl="reference"')
        q, k, v, slopes, alpha_tensor, score, weight, *kept = ctx.saved_tensors
        alpha: Alpha = ctx.alpha if alpha_tensor is None else alpha_tensor
        rules, bounds = replace(ctx.rules, slopes=slopes), ctx.bounds
        dtype = score.dtype
        d_q, d_k, d_v = (torch.zeros_like(tensor, dtype=dtype) for tensor in (q, k, v))
        wants_slopes = slopes is not None and ctx.needs_input_grad[3]
        wants_alpha = alpha_tensor is not None and ctx.needs_input_grad[4]
        d_slopes = torch.zeros_like(slopes, dtype=dtype) if wants_slopes else None
        d_alpha = torch.zeros(q.shape[1], dtype=dtype, device=q.device) if wants_alpha else None
        for block, place in ctx.blocks:
            head, kv_head, rows, keys = block.head, block.kv_head, block.rows, block.keys
            d_out, queries = (tensor[:, head, rows].to(dtype) for tensor in (grads[0], q))
            own_keys, values = (tensor[:, kv_head, keys].to(dtype) for tensor in (k, v))
            head_alpha = _alpha_of(alpha, block, q.shape[1], dtype)
            if place is not None:
                p, few = kept[place : place + 2]
                d_p, d_values = weighted_sum_vjp(p, few, values, d_out)
            else:
                anchor = Anchor(score[:, head, rows, None], weight[:, head, rows, None])
                p = weights(_block_scores(q, k, rules, block, dtype), head_alpha, anchor, bounds)
                d_p, d_values = d_out @ values.transpose(-1, -2), p.transpose(-1, -2) @ d_out
            d_scores, d_head_alpha = entmax_vjp(p, head_alpha, d_p, bounds, wants_alpha)
            if place is not None:
                d_queries = weighted_sum(d_scores, few, own_keys)
                d_keys = spread(d_scores, few, own_keys, queries)
            else:
                d_queries, d_keys = d_scores @ own_keys, d_scores.transpose(-1, -2) @ queries
            d_v[:, kv_head, keys] += d_values
            d_q[:, head, rows] = d_queries * rules.scale
            d_k[:, kv_head, keys] += d_keys * rules.scale
            if d_slopes is not None:
                seen = block.key_positions if place is None else block.key_positions[few]  # (keys,) or (B, rows, few)
                d_slopes[head] -= (d_scores * (block.positions[:, None] - seen).abs()).sum()
            if d_alpha is not None and d_head_alpha is not None:
                d_alpha[head] += d_head_alpha.sum()
        return (
            d_q.to(q.dtype),
            d_k.to(k.dtype),
            d_v.to(v.dtype),
            None if d_slopes is None else d_slopes.to(slopes.dtype),
            None if d_alpha is None else d_alpha.sum_to_size(alpha_tensor.shape).to(alpha_tensor.dtype),
            *(None,) * 3,
        )


def _block_scores(q: Tensor, k: Tensor, rules: Rules, block: _Block, dtype: torch.dtype) -> Tensor:
    """The scores of one block, (batch, rows, keys)."""
    head = slice(block.head, block.head + 1)
    queries = q[:, head, block.rows].to(dtype)
    keys = k[:, block.kv_head : block.kv_head + 1, block.keys].to(dtype)
    # Two passes over all scores that most blocks do without: slopes of 0, and the future, which is in the last keys.
    own = replace(rules, causal=False, slopes=rules.slopes[head] if rules.slopes is not None and block.slope else None)
    scores = score_block(queries, keys, own, block.positions, block.key_positions).squeeze(1)
    if rules.causal:
        seen = max(block.rows.start + k.shape[2] - q.shape[2] + 1 - block.keys.start, 0)  # by all of these queries
        future = block.key_positions[seen:] > block.positions[:, None]
        scores[..., seen:].masked_fill_(future, -torch.inf)
    return scores


def _alpha_of(alpha: Alpha, block: _Block, num_heads: int, dtype: torch.dtype) -> Alpha:
    """The alpha of a block's head."""
    return alpha.to(dtype).expand(num_heads)[block.head, None] if isinstance(alpha, Tensor) else alpha


def _blocks(q: Tensor, k: Tensor, rules: Rules, alpha: Alpha) -> Iterator[_Block]:
    """Blocks of queries by head, each with the contiguous run of keys that it needs."""
    batch, num_heads, time, _ = q.shape
    key_time = k.shape[2]
    if 0 in (batch, time, key_time):
        return
    positions = query_positions(time, key_time, q.device)
    key_positions = torch.arange(key_time, device=q.device)
    key_limit = key_time if rules.lengths is None else min(max(int(rules.lengths.max()), 0), key_time)
    at_once = _SCORES_AT_ONCE.get(q.device.type, _SCORES_AT_ONCE["cpu"])
    slopes = [0.0] * num_heads if rules.slopes is None else rules.slopes.tolist()
    alphas = alpha.expand(num_heads).tolist() if isinstance(alpha, Tensor) else [alpha] * num_heads
    offset = key_time - time
    for head in range(num_heads):
        kv_head = head // (num_heads // k.shape[1])
        windowed = rules.causal and slopes[head] > 0 and alphas[head] > 1
        key_norms = _block_maxima(k[:, kv_head]) if windowed else None
        start = 0
        while start < time:
            sees = min(start + _MOST_ROWS + offset, key_limit) if rules.causal else key_limit
            rows = slice(start, min(start + max(1, min(_MOST_ROWS, at_once // max(1, batch * sees))), time))
            start = rows.stop
            stop = min(rows.stop + offset, key_limit) if rules.causal else key_limit
            if stop <= 0 or (rows.start + offset >= key_limit and rules.lengths is not None):
                continue  # these queries see nothing and give zeros
            first = 0
            if key_norms is not None:
                own_keys = k[:, kv_head, max(rows.start + offset, 0) : rows.stop + offset]
                queries = q[:, head, rows.stop - own_keys.shape[1] : rows.stop]
                first = _first_key(
                    queries, own_keys, key_norms, slopes[head], alphas[head], rules.scale, rows.stop + offset
                )
            if rules.documents is not None:
                first = max(first, _first_of_documents(rules.documents, positions[rows], stop))
            keys = slice(first, stop)
            yield _Block(head, kv_head, rows, keys, slopes[head], positions[rows], key_positions[keys])


def _block_maxima(k: Tensor) -> Tensor:
    """The largest norm in every block of keys, (batch, blocks)."""
    norms = torch.linalg.vector_norm(k.to(torch.promote_types(k.dtype, torch.float32)), dim=-1)
    padding = -norms.shape[-1] % _KEY_BLOCK
    return torch.nn.functional.pad(norms, (0, padding)).unflatten(-1, (-1, _KEY_BLOCK)).amax(-1)


def _first_key(
    q: Tensor, own_keys: Tensor, key_norms: Tensor, slope: float, alpha: float, scale: float, end: int
) -> int:
    """The first key that the bound of the module's docstring leaves alive for any of the queries that end at `end`."""
    q, own_keys = q.to(key_norms.dtype), own_keys.to(key_norms.dtype)
    reach = torch.linalg.vector_norm(q, dim=-1) * abs(scale) * _ROUNDING  # (B, rows)
    floor = (
        (q * own_keys).sum(-1) * scale - 1 / (alpha - 1) - (_ROUNDING - 1) * reach * key_norms.amax(-1, keepdim=True)
    )
    positions = torch.arange(end - q.shape[1], end, device=q.device)
    last_of_block = torch.arange(key_norms.shape[-1], device=q.device) * _KEY_BLOCK + (_KEY_BLOCK - 1)
    distance = (positions[:, None] - last_of_block).clamp_min(0)  # (rows, blocks)
    best = reach[..., None] * key_norms[:, None] - slope * distance  # (B, rows, blocks)
    dead = (best <= floor[..., None]).flatten(0, 1).all(0)  # NaN is never dead
    return int(dead.long().cumprod(0).sum()) * _KEY_BLOCK


def _first_of_documents(documents: Tensor, positions: Tensor, stop: int) -> int:
    """The first key that shares a document with any of the queries at `positions`."""
    own = documents[:, positions.clamp_min(0)]
    shared = (own[:, :, None] == documents[:, None, :stop]).flatten(0, 1).any(0)
    return int(shared.long().argmax())


def empty_stats(like: Tensor) -> RowStats:
    """The statistics of rows that see nothing."""
    return RowStats(
        torch.full_like(like, torch.inf), torch.zeros_like(like, dtype=torch.long), like.clone(), like.clone()
    )


def _row_stats(p: Tensor, scores: Tensor, anchor: Anchor, alpha: Alpha) -> RowStats:
    tau = tau_of(anchor, alpha)
    sees_nothing = scores.amax(-1, keepdim=True) == -torch.inf
    tau = torch.where(sees_nothing, torch.inf, tau).squeeze(-1)
    return RowStats(tau, (p > 0).sum(-1), torch.special.entr(p).sum(-1), p.amax(-1))
