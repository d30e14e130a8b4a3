"""Attention under the masks of transformers, and the function that its models call for it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longspan.functional import attention, attention_weights, entmax
from longspan.functional.attention import check_rules, scaled_queries
from longspan.functional.reference import dense_attention, dense_scores
from longspan.functional.scores import Rules, grouped_product
from longspan.functional.threshold import Alpha
from longspan.integrations.transformers.masks import View, read_mask, tokens_seen
from longspan.nn.normalizers import Normalizer
from longspan.nn.positions import Position
from longspan.nn.scalers import NoScale, Scaler

DEFAULT_ALPHA = 1.5

# Scores kept at once when no gradient is wanted: 64 MiB of float32.
_SCORES_AT_ONCE = 1 << 24

_REFUSED = {
    "softcap": "a soft cap on the scores: set config.attn_logit_softcapping = None before building the model",
    "s_aux": "attention sinks",
    "position_bias": "a learned position bias",
    "head_mask": "a head mask",
    "indices": "a choice of keys by an indexer",
    "block_indices": "a choice of blocks by an indexer",
}


class Parts(nn.Module):
    """What a converted layer has beyond its own weights: a scaler, and slopes in place of or beside its rotations."""

    def __init__(self, scaler: Scaler, position: Position):
        super().__init__()
        self.scaler, self.position = scaler, position


class Scoring(NamedTuple):
    """How scores are made and what is made of them: an entmax, or whatever `normalizer` does."""

    alpha: Alpha
    scale: float
    slopes: Tensor | None = None
    causal: bool = True
    normalizer: Normalizer | None = None


def scoring_of(normalizer: Normalizer, scale: float, slopes: Tensor | None, causal: bool) -> Scoring:
    """The scoring of a layer of ours."""
    form = normalizer.entmax_form()
    if form is None:
        return Scoring(1.0, scale, slopes, causal, normalizer)
    slopes = None if slopes is None else slopes / form.temperature
    return Scoring(form.alpha, scale / form.temperature, slopes, causal)


def longspan_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    output_attentions: bool | None = None,
    layer_input: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """What a layer of transformers calls: (batch, heads, time, dim) to (batch, time, heads, dim) and the map if wanted.

    alpha is the config's `longspan_alpha`. `layer_input` comes from converted layers, whose scale is read from it.
    """
    if dropout:
        raise ValueError(
            f"longspan attention has no dropout, the model asks for {dropout}: set config.attention_dropout = 0.0"
        )
    for name, what in _REFUSED.items():
        if options.get(name) is not None:
            raise ValueError(f"longspan attention does not support {what}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    view = read_mask(attention_mask, key.shape[2])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(getattr(module.config, "longspan_alpha", DEFAULT_ALPHA), scale, causal=causal)
    if layer_input is not None:
        parts = module.longspan
        assert isinstance(parts, Parts)
        scoring = scoring._replace(slopes=parts.position.slopes)
        query = scaled(query, layer_input, view, parts.scaler, parts.position, causal)
    # Under autocast rotated queries and keys may be float32 beside a value of half that; the three must agree.
    query, key = query.to(value.dtype), key.to(value.dtype)
    out = attend(query, key, value, view, scoring)
    return out.transpose(1, 2).contiguous(), attention_map(query, key, view, scoring) if output_attentions else None


def scaled(q: Tensor, x: Tensor, view: View, scaler: Scaler, position: Position, causal: bool) -> Tensor:
    """The queries times what a scaler makes of the layer's input and of the number of tokens each of them sees."""
    if isinstance(scaler, NoScale):
        return q  # nobody asks for n, whose count sorts the documents
    n = tokens_seen(view, q.shape[0], q.shape[2], causal, q.device)  # (B, T)
    scale = scaler(x, n)  # (B, H, T)
    if scale is None:
        return q
    return scaled_queries(q, torch.where(position.scaled[:, None], scale, 1))


def attend(q: Tensor, k: Tensor, v: Tensor, view: View, scoring: Scoring) -> Tensor:
    """Attention of queries (batch, heads, time, dim) to what a mask lets them see."""
    k, v = k[:, :, : view.used], v[:, :, : view.used]
    if view.dense is not None:
        return _dense_attention(q, k, v, view, scoring)
    if scoring.normalizer is not None:
        return dense_attention(q, k, v, _rules(q, k, view, scoring), scoring.normalizer)
    return attention(
        q,
        k,
        v,
        alpha=scoring.alpha,
        slopes=scoring.slopes,
        scale=scoring.scale,
        causal=scoring.causal,
        documents=view.documents,
    )


def attention_map(q: Tensor, k: Tensor, view: View, scoring: Scoring) -> Tensor:
    """The weights, (batch, heads, queries, keys); room of a cache that is not filled has none."""
    room = k.shape[2] - view.used
    k = k[:, :, : view.used]
    if view.dense is not None:
        p = _dense_weights(q, k, view, scoring, _places(q, k))
    elif scoring.normalizer is not None:
        p = scoring.normalizer(dense_scores(q, k, _rules(q, k, view, scoring)))
    else:
        p = attention_weights(
            q,
            k,
            alpha=scoring.alpha,
            slopes=scoring.slopes,
            scale=scoring.scale,
            causal=scoring.causal,
            documents=view.documents,
        )
    return nn.functional.pad(p, (0, room)).to(q.dtype)


def _rules(q: Tensor, k: Tensor, view: View, scoring: Scoring) -> Rules:
    return check_rules(q, k, k, scoring.slopes, scoring.scale, scoring.causal, None, view.documents)


def _dense_attention(q: Tensor, k: Tensor, v: Tensor, view: View, scoring: Scoring) -> Tensor:
    """Without gradients the queries go through in blocks, so memory does not grow with the square of the length."""
    rows = q.shape[2]
    tracked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
    step = max(1, _SCORES_AT_ONCE // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    if tracked or step >= rows:
        step = max(1, rows)
    places = _places(q, k)
    blocks = []
    for start in range(0, rows, step):
        part = slice(start, start + step)
        p = _dense_weights(q[:, :, part], k, view.rows(part), scoring, None if places is None else places[part])
        blocks.append(grouped_product(p, v.to(p.dtype)).to(v.dtype))
    return torch.cat(blocks, dim=2)


def _places(q: Tensor, k: Tensor) -> Tensor | None:
    """Where the queries stand among the keys, if these are all their own, (queries,)."""
    return torch.arange(k.shape[2], device=k.device) if q.shape[2] == k.shape[2] else None


def _dense_weights(q: Tensor, k: Tensor, view: View, scoring: Scoring, places: Tensor | None) -> Tensor:
    """Weights under a dense mask, in float32 or better."""
    assert view.dense is not None
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = grouped_product(q.to(dtype) * scoring.scale, k.to(dtype).transpose(-1, -2))  # (B, H, Q, K)
    if scoring.slopes is not None:
        keys = torch.arange(k.shape[2], device=q.device)
        # Over a cache, which may have room that is not filled, a query is the last token that it sees.
        own = torch.where(view.dense, keys, 0).amax(-1, keepdim=True) if places is None else places[:, None]
        scores = scores - scoring.slopes.to(dtype)[:, None, None] * (own - keys).abs().to(dtype)
    if view.bias is not None:
        scores = scores + view.bias
    scores = scores.masked_fill(~view.dense, -torch.inf)
    if scoring.normalizer is not None:
        return scoring.normalizer(scores)
    alpha = scoring.alpha
    return entmax(scores, alpha.reshape(-1, 1, 1) if isinstance(alpha, Tensor) else alpha)
