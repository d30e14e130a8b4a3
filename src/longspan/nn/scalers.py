"""Scalers: a number per query and head that multiplies the query, as a function of the visible length n and content.

`log_length` is log(n + 1), so that the first token sees log 2 and a negative power of it stays finite; the paper's
released code counts so too.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def log_length(n: Tensor, x: Tensor) -> Tensor:
    """log(n + 1) of the number of visible tokens, in the precision of `x` or float32, whichever is higher."""
    return n.to(torch.promote_types(x.dtype, torch.float32)).log1p()


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x). Not torch's own: a compiler is told other strides of its gradient than it has."""
    return torch.logaddexp(x, x.new_zeros(()))


class Scaler(nn.Module):
    """From the layer's input (batch, time, dim) and n (batch, time) to multipliers (batch, heads, time), or None."""

    def projections(self) -> Sequence[nn.Linear]:
        """The linear layers that read x. `forward` of a scaler that has some takes their results as `projected` too."""
        return ()

    def forward(self, x: Tensor, n: Tensor) -> Tensor | None:
        raise NotImplementedError


class NoScale(Scaler):
    """Queries stay as they are."""

    def forward(self, x: Tensor, n: Tensor) -> None:
        return None


class SSMax(Scaler):
    """delta + s log n, s learned per head (Nakanishi 2025)."""

    def __init__(self, dim: int, num_heads: int, delta: float = 0.0):
        super().__init__()
        self.s = nn.Parameter(1 + 0.01 * torch.randn(num_heads))
        self.delta = delta

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return self.delta + self.s[:, None] * log_length(n, x)[:, None]  # (B, H, T)


class Scalable(Scaler):
    """delta + beta (log n)^gamma, beta and gamma learned per head (SEntmax).

    `initial_beta`, `initial_gamma`: where all heads start; None for beta draws both, as the released code does.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        delta: float = 1.0,
        *,
        initial_beta: float | None = None,
        initial_gamma: float = 0.0,
    ):
        super().__init__()
        self.beta = nn.Parameter(torch.empty(num_heads).uniform_(0.1, 1))
        self.gamma = nn.Parameter(0.1 * torch.randn(num_heads))
        self.delta = delta
        if initial_beta is not None:
            nn.init.constant_(self.beta, initial_beta)
            nn.init.constant_(self.gamma, initial_gamma)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        power = log_length(n, x)[:, None] ** self.gamma[:, None]  # (B, H, T)
        return self.delta + self.beta[:, None] * power


class Adaptive(Scaler):
    """delta + beta (log n)^gamma with beta = softplus(x w_beta), gamma = s tanh(x w_gamma) (ASEntmax, ASSMax).

    Args:
        delta, gamma_range: the paper's delta and s.
        gamma: a number fixes gamma for every query, as in the paper's Max Retrieval rows; None learns it.
        initial_beta, initial_gamma: beta and gamma at the start, for every query: the projections start at zero.
            None for beta draws both like any linear layer, as the released code does; there the scale starts anywhere
            from 1 to 20, and training often does not recover. Training at short lengths says little about gamma, so
            where it starts decides how the scale grows beyond them.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        delta: float = 1.0,
        gamma_range: float = 2.0,
        gamma: float | None = None,
        initial_beta: float | None = 0.05,
        initial_gamma: float = 0.0,
    ):
        super().__init__()
        self.delta, self.gamma_range = delta, gamma_range
        self.beta = nn.Linear(dim, num_heads)
        self.gamma = nn.Linear(dim, num_heads) if gamma is None else float(gamma)
        if initial_beta is not None:
            if not initial_beta > 0:
                raise ValueError(f"initial_beta must be positive, got {initial_beta}")
            if not abs(initial_gamma) < gamma_range:
                raise ValueError(f"initial_gamma must be within +-{gamma_range}, the gamma_range, got {initial_gamma}")
            nn.init.zeros_(self.beta.weight)
            nn.init.constant_(self.beta.bias, math.log(math.expm1(initial_beta)))  # softplus's inverse
            if isinstance(self.gamma, nn.Linear):
                nn.init.zeros_(self.gamma.weight)
                nn.init.constant_(self.gamma.bias, math.atanh(initial_gamma / gamma_range))

    def projections(self) -> Sequence[nn.Linear]:
        return (self.beta, self.gamma) if isinstance(self.gamma, nn.Linear) else (self.beta,)

    def forward(self, x: Tensor, n: Tensor, projected: Sequence[Tensor] | None = None) -> Tensor:
        projected = [layer(x) for layer in self.projections()] if projected is None else projected
        log_n = log_length(n, x)[..., None]  # (B, T, 1)
        beta = softplus(projected[0].to(log_n.dtype))  # (B, T, H)
        if isinstance(self.gamma, nn.Linear):
            power = log_n ** (self.gamma_range * projected[1].to(log_n.dtype).tanh())
        else:
            power = log_n**self.gamma
        return (self.delta + beta * power).transpose(1, 2)  # (B, H, T)


SCALERS: dict[str, type[Scaler]] = {
    "none": NoScale,
    "ssmax": SSMax,
    "scalable": Scalable,
    "adaptive": Adaptive,
}
