"""Normalisers: from a row of scores to weights. One class each; add one, list it in `NORMALIZERS`, and it is tested.

A normaliser is called with masked scores (batch, heads, rows, keys), -inf where a key is hidden, and returns weights
of that shape; a row that sees nothing gives zeros. One that is an entmax at heart says so in `entmax_form`, and then
attention runs through `longspan.attention` without ever building the scores; one with kernels of its own has them in
`by_kernels`.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from longspan.functional import entmax
from longspan.functional.attention import on_chip, scaled_queries
from longspan.functional.scores import Rules, tracked
from longspan.functional.threshold import Alpha


class EntmaxForm(NamedTuple):
    """``weights = entmax(scores / temperature, alpha)``."""

    alpha: Alpha
    temperature: float


class Normalizer(nn.Module):
    """From masked scores to weights.

    Attributes:
        ordered: whether the order of the keys matters, so that only causal attention makes sense.
    """

    ordered = False

    def forward(self, scores: Tensor) -> Tensor:
        raise NotImplementedError

    def entmax_form(self) -> EntmaxForm | None:
        """The equivalent entmax, if there is one."""
        return None

    def by_kernels(self, q: Tensor, k: Tensor, v: Tensor, scales: Tensor | None, rules: Rules) -> Tensor | None:
        """The attention of these weights by a GPU's kernels, where there are any that serve.

        `scales`: a factor of every query, as in `longspan.attention`.
        """
        return None


class Softmax(Normalizer):
    """softmax(scores / temperature)."""

    def __init__(self, temperature: float = 1.0):
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.temperature = temperature

    def forward(self, scores: Tensor) -> Tensor:
        return entmax(scores / self.temperature, 1.0)

    def entmax_form(self) -> EntmaxForm:
        return EntmaxForm(1.0, self.temperature)


class Entmax(Normalizer):
    """alpha-entmax with a fixed alpha from 1 to 64, or one learned per head as 1 + sigmoid(w), which starts at 1.5."""

    def __init__(self, alpha: float | Literal["learned"] = 1.5, num_heads: int = 1):
        super().__init__()
        self.logit: nn.Parameter | None = None
        if alpha == "learned":
            self.logit = nn.Parameter(torch.zeros(num_heads))
        elif not 1 <= alpha <= 64:
            raise ValueError(f"alpha must be between 1 and 64, got {alpha}")
        self.fixed = alpha

    @property
    def alpha(self) -> Alpha:
        return float(self.fixed) if self.logit is None else 1 + self.logit.sigmoid()

    def forward(self, scores: Tensor) -> Tensor:
        alpha = self.alpha
        return entmax(scores, alpha[:, None, None] if isinstance(alpha, Tensor) else alpha)

    def entmax_form(self) -> EntmaxForm:
        return EntmaxForm(self.alpha, 1.0)


class TopK(Normalizer):
    """softmax over the k largest scores of a row, or over the largest `fraction` of those it sees (at least one).

    Scores that tie for the last places share them, each with the same part, whatever the order of the keys.
    """

    def __init__(self, k: int | None = None, fraction: float | None = None):
        super().__init__()
        if (k is None) == (fraction is None):
            raise ValueError("give either k or fraction")
        if (k is not None and k < 1) or (fraction is not None and not 0 < fraction <= 1):
            raise ValueError(f"k must be at least 1 and fraction in (0, 1], got k={k}, fraction={fraction}")
        self.k, self.fraction = k, fraction

    def forward(self, scores: Tensor) -> Tensor:
        kept, edge = self._kept(scores.detach())
        above, tied = scores > edge, (scores == edge) & (edge > -math.inf)
        share = (kept - above.sum(-1, keepdim=True)) / tied.sum(-1, keepdim=True).clamp_min(1)
        part = torch.where(tied, share.to(scores.dtype).log(), 0)
        # NaN is not below: it makes its row NaN.
        return entmax((scores + part).masked_fill(scores < edge, -math.inf), 1.0)

    def _kept(self, scores: Tensor) -> tuple[int | Tensor, Tensor]:
        """How many scores of a row have a place, and the lowest of them; -inf where it sees no more than that."""
        if self.k is not None:
            kept = min(self.k, scores.shape[-1])
            return kept, scores.topk(kept, dim=-1).values[..., -1:]
        assert self.fraction is not None
        seen = (scores > -math.inf).sum(-1, keepdim=True)
        # A hair more, because 0.29 of 100 is 28.999999999999996.
        places = (seen.double() * self.fraction + 1e-9).long().clamp_min(1)
        return places, scores.sort(dim=-1, descending=True).values.gather(-1, places - 1)

    def by_kernels(self, q: Tensor, k: Tensor, v: Tensor, scales: Tensor | None, rules: Rules) -> Tensor | None:
        """Of a number of scores, not of a fraction. With gradients rows must fit on the chip."""
        if self.k is None:
            return None
        masks = rules.lengths, rules.documents
        if on_chip(q, k, v):
            from longspan.kernels.short import short_attention

            factor = None if scales is None else scales.float()
            return short_attention(q, k, v, rules.slopes, factor, *masks, 1.0, rules.scale, rules.causal, self.k)[0]
        from longspan.kernels.topk import MOST, topk_attention

        if self.k > MOST or tracked(rules, q, k, v, scales):
            return None
        q = scaled_queries(q, scales)
        return topk_attention(q, k, v, rules.slopes, *masks, self.k, rules.scale, rules.causal)


class AdaptiveTemperature(Normalizer):
    """softmax(beta * scores), beta >= 1 a polynomial in the entropy of softmax(scores).

    Velickovic et al. 2024 (arXiv:2410.01104) fitted it on Max Retrieval and apply it to trained softmax models, with no
    parameters changed. The coefficients are highest power first; below entropy 0.5 nothing is done.
    """

    COEFFICIENTS = (-0.037, 0.481, -2.3, 4.917, -1.791)

    def forward(self, scores: Tensor) -> Tensor:
        p = entmax(scores, 1.0)
        hidden = scores == -math.inf
        # log Z - <p, s> instead of -<p, log p>, whose gradient is not finite where p underflows
        finite = scores.masked_fill(hidden, 0)
        log_z = scores.masked_fill(hidden.all(-1, keepdim=True), 0).logsumexp(-1, keepdim=True)
        entropy = log_z - (p * finite).sum(-1, keepdim=True)
        polynomial = torch.zeros_like(entropy)
        for coefficient in self.COEFFICIENTS:
            polynomial = polynomial * entropy + coefficient
        beta = torch.where(entropy > 0.5, polynomial.clamp_min(1), 1)
        return entmax(finite * beta + torch.where(hidden, -math.inf, 0), 1.0)


class StickBreaking(Normalizer):
    """Each key, from the nearest back, takes the share sigmoid(score) of what is left (Tan et al. 2025).

    Weights sum to at most one. The current token, the last that a row sees, is left out, as in the original. The order
    of the keys is its position encoding, so it belongs with NoPE.
    """

    ordered = True

    def forward(self, scores: Tensor) -> Tensor:
        seen = scores > -math.inf
        current = seen & (seen.flip(-1).cumsum(-1).flip(-1) == 1)
        scores = scores.masked_fill(current, -math.inf)
        left = nn.functional.logsigmoid(-scores)  # log(1 - sigmoid)
        after = left.flip(-1).cumsum(-1).flip(-1)[..., 1:]
        after = nn.functional.pad(after, (0, 1))  # (..., j) = sum over the keys behind j, nearer to the query
        return (nn.functional.logsigmoid(scores) + after).exp()

    def by_kernels(self, q: Tensor, k: Tensor, v: Tensor, scales: Tensor | None, rules: Rules) -> Tensor | None:
        """Without gradients."""
        if tracked(rules, q, k, v, scales):
            return None
        from longspan.kernels.stick import stick_attention

        q = scaled_queries(q, scales)
        return stick_attention(q, k, v, rules.slopes, rules.lengths, rules.documents, rules.scale)


NORMALIZERS: dict[str, type[Normalizer]] = {
    "softmax": Softmax,
    "entmax": Entmax,
    "topk": TopK,
    "adaptive_temperature": AdaptiveTemperature,
    "stick_breaking": StickBreaking,
}
