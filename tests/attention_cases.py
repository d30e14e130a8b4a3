"""Calls of attention, named by what is odd about them, and ways to run one."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan import AttentionStats, attention

IMPLEMENTATIONS = ["reference", "chunked"]
STAT_NAMES = ("tau", "support", "entropy", "largest")


@dataclass(frozen=True)
class Case:
    """One call of attention. A tuple of alphas is a learnt tensor, one per head; of length 0, a learnt scalar."""

    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    query_time: int = 11
    key_time: int = 11
    dim: int = 5
    value_dim: int = 5
    alpha: float | tuple[float, ...] = 1.5
    slopes: tuple[float, ...] | None = None
    scale: float | None = None
    scales: bool = False  # one for every query
    causal: bool = True
    lengths: tuple[int, ...] | None = None
    documents: str | None = None
    logits: float = 1.0  # the size of q


def call_of(case: Case, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The arguments of `attention`, with everything that can be differentiated asking for it."""
    generator = torch.Generator().manual_seed(case.query_time * 101 + case.key_time)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    kv = (case.batch, case.kv_heads, case.key_time)
    tensors = {
        "q": gaussian(case.batch, case.heads, case.query_time, case.dim) * case.logits,
        "k": gaussian(*kv, case.dim),
        "v": gaussian(*kv, case.value_dim),
    }
    if case.slopes is not None:
        tensors["slopes"] = torch.tensor(case.slopes, dtype=torch.float64)
    if case.scales:
        tensors["scales"] = 0.2 + gaussian(case.batch, case.query_time, case.heads).abs().transpose(1, 2)
    call: dict[str, Any] = {name: value.to(device, dtype).requires_grad_() for name, value in tensors.items()}
    call |= {"alpha": case.alpha, "scale": case.scale, "causal": case.causal}
    if isinstance(case.alpha, tuple):
        values = case.alpha if len(case.alpha) > 1 else case.alpha[0]
        call["alpha"] = torch.tensor(values, dtype=dtype, device=device, requires_grad=True)
    if case.lengths is not None:
        call["lengths"] = torch.tensor(case.lengths, dtype=torch.long, device=device)
    if case.documents is not None:
        call["documents"] = documents_of(case).to(device)
    return call


def map_call_of(case: Case, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The arguments of `attention_weights`."""
    return {name: value for name, value in call_of(case, device=device).items() if name != "v"}


def documents_of(case: Case) -> Tensor:
    """Three documents in every sequence, cut at other places in each."""
    position = torch.arange(case.key_time) + torch.arange(case.batch)[:, None]
    if case.documents == "contiguous":
        return position * 3 // case.key_time
    return position * 7 // 2 % 3


def attend(call: dict[str, Any], impl: str) -> Tensor:
    out = attention(**call, impl=impl)
    assert isinstance(out, Tensor)
    return out


def attend_with_stats(call: dict[str, Any], impl: str) -> tuple[Tensor, AttentionStats]:
    out = attention(**call, impl=impl, return_stats=True)
    assert isinstance(out, tuple)
    return out


def learnt(call: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in call.items() if isinstance(value, Tensor) and value.requires_grad}


def gradients(out: Tensor, call: dict[str, Any]) -> dict[str, Tensor]:
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    inputs = learnt(call)
    return dict(zip(inputs, torch.autograd.grad(out, list(inputs.values()), direction.to(out)), strict=True))
