"""RMS norm."""

from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """Works in the precision of its weights, whatever autocast has made of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))
