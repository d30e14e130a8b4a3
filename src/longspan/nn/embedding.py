"""Embeddings of small vocabularies, whose gradient is a product."""

from typing import Any

import torch
from torch import Tensor, nn

_SMALL = 1024  # rows; one-hot vectors of many more take more memory than they save launches


class Embedding(nn.Embedding):
    """`nn.Embedding`, whose gradient on a GPU sorts all tokens in many small launches: here it is one product there."""

    def forward(self, tokens: Tensor) -> Tensor:
        if self.weight.is_cuda and self.num_embeddings <= _SMALL:
            out: Tensor = LookUp.apply(tokens, self.weight)
            return out
        return super().forward(tokens)


class LookUp(torch.autograd.Function):
    """Rows of a weight (rows, dim) by tokens of any shape; the gradient sums those of equal tokens by a product."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = len(weight)
        return nn.functional.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        one_hot = tokens.flatten()[:, None] == torch.arange(ctx.rows, device=tokens.device)
        with torch.autocast(tokens.device.type, enabled=False):  # a compiler takes the forward's autocast for granted
            return None, one_hot.mT.to(gradient.dtype) @ gradient.flatten(0, -2)
