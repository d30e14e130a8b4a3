"""Calls of attention for the kernels of long rows, named by what is odd about them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from attention_cases import Case
from torch import Tensor

Pair = tuple[Tensor, Tensor]
Content = Callable[[Tensor, Tensor], Pair]  # what to make of Gaussian queries and keys


def noise(q: Tensor, k: Tensor) -> Pair:
    return q, k


def topics(width: int) -> Content:
    """Runs of `width` tokens share one of four topics, and a query keeps only keys of its own."""

    def content(q: Tensor, k: Tensor) -> Pair:
        topic = torch.arange(k.shape[2]) // width % 4
        own = 8 * torch.eye(k.shape[3], dtype=k.dtype)[topic]  # (key_time, dim)
        return q / 4 + own[-q.shape[2] :], k / 2 + own

    return content


def ties(q: Tensor, k: Tensor) -> Pair:
    return q, k[:, :, :1].expand_as(k)


def equal_maxima(q: Tensor, k: Tensor) -> Pair:
    """Every fifth key is the same and wins."""
    shared = torch.arange(k.shape[2])[:, None] % 5 == 0
    return q.abs() + 1, torch.where(shared, 3.0, k)


def level(score: float, then: Content = noise) -> Content:
    """Every score moved by about `score`, with factors whose gradients float16 can hold."""

    def content(q: Tensor, k: Tensor) -> Pair:
        q, k = (tensor.clone() for tensor in then(q, k))
        q[..., 0], k[..., 0] = score * math.sqrt(q.shape[3]) / 100, 100.0
        return q, k

    return content


def one_large(q: Tensor, k: Tensor) -> Pair:
    """One key's score is 1e4."""
    q, k = q.clone(), k.clone()
    q[..., 0], k[..., 0] = 8.0, 0.0
    k[:, :, k.shape[2] // 3, 0] = 1e4 * math.sqrt(q.shape[3]) / 8
    return q, k


@dataclass(frozen=True)
class Problem(Case):
    """A call of attention whose queries and keys have a structure."""

    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    query_time: int = 70
    key_time: int = 70
    dim: int = 16
    value_dim: int = 16
    logits: float = 2.0
    content: Content = noise


def square(time: int, **options: Any) -> Problem:
    return Problem(query_time=time, key_time=time, **options)


ALPHAS = (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)

PROBLEMS = {
    **{f"alpha_{alpha}": square(70, alpha=alpha) for alpha in ALPHAS},
    **{f"alpha_{alpha}_and_the_future": square(40, alpha=alpha, causal=False) for alpha in (1.0, 1.25, 2.0, 3.0)},
    **{f"{time}_tokens": square(time) for time in (1, 2, 63, 65, 127, 129, 130, 200, 300)},
    "softmax_of_200_tokens": square(200, alpha=1.0, logits=1.0),
    "sparsemax_of_200_tokens": square(200, alpha=2.0),
    "one_query": Problem(query_time=1, key_time=200),
    "fewer_queries": Problem(query_time=70, key_time=200),
    "fewer_queries_of_softmax": Problem(query_time=70, key_time=200, alpha=1.0),
    "more_queries": Problem(query_time=150, key_time=70),
    "more_queries_of_softmax": Problem(query_time=150, key_time=70, alpha=1.0),
    "one_key": Problem(query_time=130, key_time=1),
    "fewer_queries_and_the_future": Problem(query_time=40, key_time=130, causal=False),
    "more_queries_and_the_future": Problem(query_time=130, key_time=40, causal=False),
    "grouped_heads": Problem(batch=2, heads=4, kv_heads=2, query_time=20, key_time=40),
    "grouped_heads_of_softmax": Problem(heads=3, query_time=40, key_time=70, alpha=1.0),
    "positive_slopes": square(130, slopes=(0.1,)),
    "zero_slope": square(70, slopes=(0.0,)),
    "mixed_slopes": square(70, heads=3, slopes=(0.25, 0.0, -0.1)),
    "slopes_and_grouped_heads": square(40, heads=4, kv_heads=2, slopes=(1.0, 0.5, 0.0, 0.1)),
    "slopes_and_the_future": square(70, heads=2, slopes=(0.3, -0.1), causal=False),
    "slopes_of_softmax": square(130, slopes=(0.1,), alpha=1.0),
    "a_window_of_few_tiles": square(300, slopes=(2.0,)),
    "a_window_of_few_tiles_alpha_1.25": square(200, slopes=(4.0,), alpha=1.25),
    "windows_and_fewer_queries": Problem(query_time=70, key_time=300, slopes=(1.0,)),
    "negative_slope": square(130, slopes=(-0.5,)),
    "negative_slope_and_fewer_queries": Problem(query_time=64, key_time=286, slopes=(-1.0,), logits=0.5),
    "negative_slope_of_softmax": square(300, slopes=(-0.5,), alpha=1.0),
    "negative_scale": square(70, scale=-0.5),
    "negative_scale_and_slopes": square(70, heads=2, scale=-0.5, slopes=(0.3, 0.0)),
    "negative_scale_of_softmax": square(70, scale=-0.5, alpha=1.0),
    "scale_0": square(70, scale=0.0),
    "scale_0_and_slopes": square(70, scale=0.0, slopes=(0.1,)),
    "lengths": square(70, batch=3, lengths=(100, 0, 63)),
    "lengths_of_softmax": square(70, batch=3, lengths=(70, 0, 33), alpha=1.0),
    "lengths_beyond_the_end": square(70, lengths=(99,)),
    "lengths_and_fewer_queries": Problem(batch=3, query_time=30, key_time=130, lengths=(130, 115, 70)),
    "lengths_and_the_future": square(70, batch=2, lengths=(65, 1), causal=False, slopes=(0.1,)),
    "contiguous_documents": square(200, documents="contiguous"),
    "interleaved_documents": square(70, documents="interleaved", slopes=(0.05,)),
    "documents_of_softmax": square(70, documents="contiguous", alpha=1.0),
    "documents_and_fewer_queries": Problem(query_time=40, key_time=130, documents="contiguous"),
    "documents_and_more_queries": Problem(query_time=130, key_time=40, documents="contiguous", causal=False),
    "documents_and_lengths": square(70, batch=2, documents="contiguous", lengths=(65, 40)),
    "documents_and_the_future": square(70, documents="interleaved", causal=False),
    **{f"dim_{dim}": square(70, dim=dim, value_dim=dim) for dim in (8, 24, 40, 64, 72, 128, 256)},
    "dim_72_of_softmax": square(70, dim=72, value_dim=72, alpha=1.0),
    "wide_values": square(70, value_dim=40),
    "narrow_values": square(70, dim=64, value_dim=8),
    "topics": square(256, content=topics(64)),
    "topics_of_sparsemax": square(130, content=topics(32), alpha=2.0),
    "topics_and_slopes": square(256, content=topics(64), slopes=(0.01,)),
    **{f"ties_of_alpha_{alpha}": square(70, content=ties, alpha=alpha) for alpha in (1.1, 1.5, 2.0, 3.0, 4.0)},
    "ties_at_1e4": square(70, content=level(1e4, ties)),
    "ties_at_1e4_of_sparsemax": square(70, content=level(1e4, ties), alpha=2.0),
    "ties_at_-1000_of_alpha_3": square(70, content=level(-1e3, ties), alpha=3.0),
    "equal_maxima": square(130, content=equal_maxima),
    "equal_maxima_of_sparsemax": square(70, content=equal_maxima, alpha=2.0),
    "scores_near_-1000": square(70, content=level(-1e3)),
    "scores_near_-10000": square(70, content=level(-1e4), alpha=1.25),
    "scores_near_-10000_of_softmax": square(70, content=level(-1e4), alpha=1.0),
    "one_score_of_10000": square(70, content=one_large),
    "one_score_of_10000_of_softmax": square(70, content=one_large, alpha=1.0),
    "queries_of_100": square(130, logits=100.0),
    "queries_of_100_alpha_1.1": square(70, logits=100.0, alpha=1.1),
    "queries_of_0": square(70, logits=0.0),
}

LARGE = {
    **{f"alpha_{alpha}": square(1500, heads=2, alpha=alpha, slopes=(0.05, 0.0)) for alpha in ALPHAS},
    "softmax_and_the_future": square(1111, alpha=1.0, causal=False),
    "the_future": square(1111, causal=False),
    **{f"dim_{dim}": square(700, dim=dim, value_dim=dim) for dim in (8, 64, 128, 136, 256)},
    "dim_136_of_softmax": square(700, dim=136, value_dim=136, alpha=1.0),
    "grouped_heads": Problem(batch=2, heads=8, kv_heads=2, query_time=500, key_time=1500, dim=64, value_dim=64),
    "more_queries": Problem(query_time=1500, key_time=500),
    "topics": square(2048, dim=64, content=topics(128)),
    "topics_of_sparsemax": square(2048, dim=64, content=topics(128), alpha=2.0),
    "windows": square(3000, heads=2, slopes=(0.5, 0.1)),
    "negative_slope": Problem(query_time=600, key_time=1478, slopes=(-0.1,)),
    "lengths": square(1000, batch=3, lengths=(1000, 0, 513), slopes=(0.01,)),
    "contiguous_documents": square(1500, batch=2, documents="contiguous"),
    "interleaved_documents": square(1500, documents="interleaved"),
    "ties": square(1500, content=ties),
    "scores_near_-10000": square(1500, content=level(-1e4)),
    "one_score_of_10000": square(1500, content=one_large),
    "queries_of_100": square(1500, logits=100.0),
}


SUMS = {
    "noise": square(130),
    **{f"alpha_{alpha}": square(40, alpha=alpha) for alpha in (1.0, 1.1, 2.0, 3.0, 4.0)},
    "slopes": square(130, slopes=(0.1,)),
    "topics": square(130, content=topics(32)),
    "ties": square(70, content=ties),
    "ties_at_1e4_of_sparsemax": square(70, content=level(1e4, ties), alpha=2.0),
    "ties_at_1e4_of_alpha_3": square(70, content=level(1e4, ties), alpha=3.0),
    "scores_near_-1000": square(70, content=level(-1e3)),
    "scores_near_-10000": square(70, content=level(-1e4), alpha=2.0),
    "one_score_of_10000": square(70, content=one_large),
    "queries_of_100": square(70, logits=100.0),
}

ROWS = {
    "noise": square(130),
    "alpha_1.25": square(70, alpha=1.25),
    "sparsemax": square(130, alpha=2.0),
    "alpha_3": square(70, alpha=3.0),
    "softmax": square(70, alpha=1.0),
    "windows": square(200, slopes=(1.0,)),
    "topics": square(130, content=topics(32)),
    "lengths": square(70, batch=3, lengths=(70, 0, 33)),
    "documents": Problem(query_time=40, key_time=130, documents="contiguous"),
    "more_queries": Problem(query_time=130, key_time=70),
    "scores_near_-1000": square(70, content=level(-1e3)),
}
