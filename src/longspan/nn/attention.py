"""The attention layer: projections, and whatever normaliser, scaler and position it is given."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from longspan.functional import attention, decode
from longspan.functional.attention import IMPLEMENTATIONS, check_rules, scaled_queries, triton_cannot
from longspan.functional.decode import kernels_cannot
from longspan.functional.reference import dense_attention
from longspan.functional.scores import Rules, visible_tokens
from longspan.kernels.pages import MANY_KEYS, MOST_QUERIES
from longspan.nn.cache import KVCache
from longspan.nn.normalizers import Normalizer
from longspan.nn.positions import Position
from longspan.nn.scalers import NoScale, Scaler


def width_of_head(dim: int, num_heads: int) -> int:
    """dim / num_heads, where that is whole."""
    if dim % num_heads:
        raise ValueError(f"num_heads ({num_heads}) does not divide dim ({dim}): give a head_dim")
    return dim // num_heads


def last_tokens(x: Tensor, last: int | None) -> Tensor:
    """The last tokens of x (batch, time, dim); x itself where that is all."""
    if last is None or last == x.shape[1]:
        return x
    if not 1 <= last < x.shape[1]:
        raise ValueError(f"last must be from 1 to the {x.shape[1]} tokens there are, got {last}")
    return x[:, x.shape[1] - last :]


def projections(layers: Sequence[nn.Linear], x: Tensor) -> list[Tensor]:
    """What every layer makes of x: on a GPU, which small products leave half idle, by one product.

    A layer that someone has put in the place of an `nn.Linear` is called as it is.
    """
    if not x.is_cuda or any(type(layer) is not nn.Linear for layer in layers):
        return [layer(x) for layer in layers]
    return joint_projection(layers, x)


def joint_projection(layers: Sequence[nn.Linear], x: Tensor) -> list[Tensor]:
    """What every layer makes of x, by one product. Neighbours with biases add them together, so that the gradients of
    these biases are one sum over all tokens, which on a GPU is two launches."""
    weight = torch.cat([layer.weight for layer in layers])
    runs: list[list[nn.Linear]] = []
    for layer in layers:
        if runs and (runs[-1][0].bias is None) == (layer.bias is None):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    parts: list[Tensor] = []
    joint = nn.functional.linear(x, weight).split([sum(_widths(run)) for run in runs], dim=-1)
    for run, part in zip(runs, joint, strict=True):
        if run[0].bias is not None:
            part = part + torch.cat([layer.bias for layer in run]).to(part.dtype)
        parts += part.split(_widths(run), dim=-1)
    return parts


def _widths(layers: Sequence[nn.Linear]) -> list[int]:
    return [layer.out_features for layer in layers]


class Attention(nn.Module):
    """Multi-head attention composed of parts.

    Args:
        dim: width of the input and output.
        num_heads, num_kv_heads, head_dim: `num_kv_heads` defaults to `num_heads`, `head_dim` to dim / num_heads.
        normalizer, scaler, position: the parts. `longspan.nn.build_attention` makes them from a method's name.
        query_norm, key_norm: optional modules on each head's queries and keys, for instance ``nn.RMSNorm(head_dim)``.
        scale: of the scores, 1/sqrt(head_dim) by default.
        impl: of `longspan.attention`. Normalisers that are no entmax have no "chunked", and "triton" where they have
            kernels of their own.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        normalizer: Normalizer,
        scaler: Scaler,
        position: Position,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        query_norm: nn.Module | None = None,
        key_norm: nn.Module | None = None,
        scale: float | None = None,
        causal: bool = True,
        impl: str = "auto",
    ):
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads ({num_kv_heads}) must divide num_heads ({num_heads})")
        if normalizer.ordered and not causal:
            raise ValueError(f"{type(normalizer).__name__} depends on the order of the past: it needs causal attention")
        if impl not in ("auto", *IMPLEMENTATIONS):
            raise ValueError(f"impl must be 'auto' or one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
        self.head_dim = width_of_head(dim, num_heads) if head_dim is None else head_dim
        self.scale = 1 / math.sqrt(self.head_dim) if scale is None else scale
        self.causal, self.impl = causal, impl
        self.normalizer, self.scaler, self.position = normalizer, scaler, position
        self.query_norm = nn.Identity() if query_norm is None else query_norm
        self.key_norm = nn.Identity() if key_norm is None else key_norm
        self.query = nn.Linear(dim, num_heads * self.head_dim, bias=False)
        self.key = nn.Linear(dim, self.num_kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(dim, self.num_kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(num_heads * self.head_dim, dim, bias=False)

    def forward(
        self,
        x: Tensor,
        *,
        lengths: Tensor | None = None,
        documents: Tensor | None = None,
        visible: Tensor | None = None,
        cache: KVCache | None = None,
        last: int | None = None,
    ) -> Tensor:
        """(batch, time, dim) to the same, or to (batch, last, dim).

        Args:
            lengths: (batch,), right padding.
            documents: (batch, time) ids of packed documents. To pad on the left, give the padding an id of its own.
            visible: (batch, time) how many tokens each sees, where that is known already.
            cache: the tokens before `x`; `x` is added to it.
            last: how many of the last tokens ask; the others are only looked at. All by default.
        """
        if cache is not None and (lengths is not None or not self.causal):
            raise ValueError("a cache needs causal attention and no right padding: pad on the left with `documents`")
        asking = last_tokens(x, last)
        (query, *for_scaler), (key, value) = self._projected(asking, x)
        q, k, v = (self._split(part) for part in (query, key, value))  # (B, H, T, D), (B, H_kv, T, D) twice
        scaling = partial(self.scaler, asking, projected=for_scaler) if for_scaler else partial(self.scaler, asking)
        # Under autocast a norm may answer in float32; the three must agree.
        q, k = self.query_norm(q).to(v.dtype), self.key_norm(k).to(v.dtype)
        positions = (
            torch.arange(x.shape[1], device=x.device) if cache is None else cache.own_positions(x.shape[1], x.device)
        )
        of_queries = positions[..., x.shape[1] - asking.shape[1] :]
        q, k = self.position.rotate(q, of_queries), self.position.rotate(k, positions)
        if cache is not None:
            k, v, documents = cache.append(k, v, documents, held=self._learns(q))
            if self._is_decoding(q, k, v, cache, documents):
                n = (of_queries + 1).expand(len(q), -1)
                out = self._decode(scaled_queries(q, self._scales(scaling, lambda: n)), k, v, cache)
                return self.output(out.transpose(1, 2).flatten(2))
            if cache.starts is not None:
                documents = cache.padding_as_document(x.device)
        rules = check_rules(q, k, v, self.position.slopes, self.scale, self.causal, lengths, documents)

        def count() -> Tensor:
            if visible is not None:
                return visible[:, x.shape[1] - asking.shape[1] :]
            return visible_tokens(rules, q.shape[2], k.shape[2], len(q), q.device)

        out = self._attend(q, k, v, rules, self._scales(scaling, count))  # (B, H, T, D)
        return self.output(out.transpose(1, 2).flatten(2))

    def _projected(self, asking: Tensor, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """What is made of the tokens that ask, for the queries and the scaler, and of all, keys and values."""
        asked, looked_at = [self.query, *self.scaler.projections()], [self.key, self.value]
        if asking is not x:
            return projections(asked, asking), projections(looked_at, x)
        parts = projections([*asked, *looked_at], x)
        return parts[:-2], parts[-2:]

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _scales(self, scaling: Callable[[Tensor], Tensor | None], count: Callable[[], Tensor]) -> Tensor | None:
        """What the scaler makes of n for every query, (B, H, T); 1 where a head has a position of its own."""
        if isinstance(self.scaler, NoScale):
            return None  # nobody asks for n, whose count may sort the documents
        scales = scaling(count())  # from (B, T)
        return None if scales is None else torch.where(self.position.scaled[:, None], scales, 1)

    def _is_decoding(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, documents: Tensor | None) -> bool:
        """Whether `decode` serves: few queries over many keys, or after padding, and nothing to differentiate."""
        form = self.normalizer.entmax_form()
        return (
            q.shape[2] <= MOST_QUERIES
            and (k.shape[2] >= MANY_KEYS or cache.starts is not None)
            and self.impl in ("auto", "triton")
            and documents is None
            and form is not None
            and not isinstance(form.alpha, Tensor)
            and not self._learns(q, k, v)
        )

    def _learns(self, *inputs: Tensor) -> bool:
        """Whether a gradient may be asked for of the inputs or of what a part has learnt."""
        if not torch.is_grad_enabled():
            return False
        parts = (self.normalizer, self.scaler, self.position)
        learnt = (parameter for part in parts for parameter in part.parameters())
        return any(tensor.requires_grad for tensor in (*inputs, *learnt))

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache) -> Tensor:
        form, slopes = self.normalizer.entmax_form(), self.position.slopes
        assert form is not None
        assert not isinstance(form.alpha, Tensor)
        by_kernels = kernels_cannot(q, v) is None
        return decode(
            q,
            k,
            v,
            alpha=form.alpha,
            slopes=None if slopes is None else slopes / form.temperature,
            scale=self.scale / form.temperature,
            starts=None if cache.starts is None else cache.starts.to(q.device),
            # Only a distance makes the norms of pages worth knowing, and only kernels leave out pages.
            summary=cache.summary() if (slopes is not None or cache.boxes) and by_kernels else None,
            impl=self.impl,
        )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, rules: Rules, scales: Tensor | None) -> Tensor:
        form = self.normalizer.entmax_form()
        if form is None:
            return self._attend_by_weights(q, k, v, rules, scales)
        return attention(
            q,
            k,
            v,
            alpha=form.alpha,
            slopes=None if rules.slopes is None else rules.slopes / form.temperature,
            scale=rules.scale / form.temperature,
            scales=scales,
            causal=rules.causal,
            lengths=rules.lengths,
            documents=rules.documents,
            impl=self.impl,
        )

    def _attend_by_weights(self, q: Tensor, k: Tensor, v: Tensor, rules: Rules, scales: Tensor | None) -> Tensor:
        """Of a normaliser that is no entmax: by kernels of its own, where those of softmax would serve, or densely."""
        name = type(self.normalizer).__name__
        if self.impl == "chunked":
            raise ValueError(f"impl='chunked' cannot serve this call: {name} is no entmax")
        if self.impl == "triton" or (self.impl == "auto" and q.is_cuda):
            reason = triton_cannot(q, k, v, 1.0)
            out = None if reason else self.normalizer.by_kernels(q, k, v, scales, rules)
            if out is not None:
                return out
            if self.impl == "triton":
                raise ValueError(f"impl='triton' cannot serve this call: {reason or f'{name} has no kernel for it'}")
        return dense_attention(scaled_queries(q, scales), k, v, rules, self.normalizer)
