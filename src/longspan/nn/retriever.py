"""The Max Retrieval model of Velickovic et al. 2024: one query, one head, a set of items."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longspan.nn.normalizers import Normalizer
from longspan.nn.scalers import Scaler


class Retrieval(NamedTuple):
    logits: Tensor  # (batch, classes)
    weights: Tensor  # (batch, items)


class Retriever(nn.Module):
    """Items and query go through an MLP each; one attention head reads the items for the query; an MLP answers."""

    def __init__(self, num_classes: int, width: int, normalizer: Normalizer, scaler: Scaler):
        super().__init__()
        self.embed_items = _mlp(1 + num_classes, width)
        self.embed_query = _mlp(1, width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.answer = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, num_classes))
        self.normalizer, self.scaler = normalizer, scaler

    def forward(self, items: Tensor, query: Tensor) -> Retrieval:
        x = self.embed_items(items)  # (B, n, W)
        asked = self.embed_query(query)[:, None]  # (B, 1, W)
        q = self.query(asked)
        n = torch.full(asked.shape[:2], items.shape[1], device=items.device)
        scale = self.scaler(asked, n)  # (B, 1, 1)
        if scale is not None:
            q = q * scale
        # With a single query, q . (W_k x) = (W_k^T q) . x and sum_i p_i (W_v x_i) = W_v (sum_i p_i x_i): the two
        # projections of every item become two of one vector.
        scores = (q @ self.key.weight) @ x.transpose(1, 2) / math.sqrt(q.shape[-1])  # (B, 1, n)
        weights = self.normalizer(scores[:, None]).squeeze(1)
        return Retrieval(self.answer(self.value(weights @ x)).squeeze(1), weights.squeeze(1))


def _mlp(inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
