"""RMS norm."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """Works in the precision of its weights, whatever autocast has made of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class HeadNorm(RMSNorm):
    """RMS norm of the queries or keys of every head, (batch, heads, time, head_dim).

    Args:
        gain: where the weights start. Small, attention starts near uniform whatever the projections.
        noise: in training, the standard deviation of Gaussian noise on the normalised coordinates of the heads marked
            in `noisy`: scores must then differ by more than the few distractors of a short sequence ask for.

    Attributes:
        gate: a factor of the noise, 1 at first; whoever trains may put a tensor of its own in its place.
    """

    noisy: Tensor
    gate: Tensor

    def __init__(self, head_dim: int, noisy: Tensor, gain: float = 1.0, noise: float = 0.0):
        super().__init__(head_dim)
        nn.init.constant_(self.weight, gain)
        self.noise = noise
        self.register_buffer("noisy", noisy[:, None, None].to(self.weight.dtype), persistent=False)
        self.register_buffer("gate", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = super().forward(x)
        if not (self.noise and self.training):
            return normed
        return normed + self.noise * self.gate * self.noisy * self.weight * torch.randn_like(normed)
