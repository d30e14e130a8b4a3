"""Positions: slopes of a distance bias per head (ALiBi, NAPE), rotations of queries and keys (RoPE), or nothing."""

import math
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

Slopes = Callable[[int], Tensor]


def linear_slopes(num_heads: int) -> Tensor:
    """1, 1/2, 1/3, ...: the paper's, for the synthetic tasks."""
    return 1 / torch.arange(1, num_heads + 1, dtype=torch.float32)


def exponential_slopes(num_heads: int) -> Tensor:
    """2^(-8h/H), the original's (Press et al. 2022): between powers of two, every other slope of the next one."""
    whole = 1 << (num_heads.bit_length() - 1)
    slopes = 2.0 ** (-8 * torch.arange(1, whole + 1, dtype=torch.float32) / whole)
    if whole == num_heads:
        return slopes
    finer = 2.0 ** (-8 * torch.arange(1, 2 * whole + 1, dtype=torch.float32) / (2 * whole))
    return torch.cat([slopes, finer[::2][: num_heads - whole]])


class Position(nn.Module):
    """What a position encoding gives to attention.

    Its buffers are no part of a checkpoint. A model that was built on the meta device must be given them: after
    `to_empty` they hold anything, and loading a checkpoint leaves them so. Copy them from one built on a CPU.

    Attributes:
        slopes: (heads,), or None for no bias.
        scaled: (heads,) bool, the heads whose queries a scaler may multiply.
    """

    slopes: Tensor | None
    scaled: Tensor

    def __init__(self, num_heads: int, slopes: Tensor | None = None, scaled: Tensor | None = None):
        super().__init__()
        all_heads = torch.ones(num_heads, dtype=torch.bool)
        # Derived from the arguments, so not part of a checkpoint.
        self.register_buffer("slopes", slopes, persistent=False)
        self.register_buffer("scaled", all_heads if scaled is None else scaled, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follows its model anywhere but into half precision, which has too few digits to count a long context in."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            now = self.get_buffer(name)
            if now.is_floating_point() and now.dtype.itemsize < torch.float32.itemsize:
                setattr(self, name, buffer.to(now.device, torch.float32))
        return self

    def rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys (batch, heads, time, head_dim) turned to their positions (time,) or (batch, time)."""
        return heads


class NoPE(Position):
    """No position at all: order enters through the causal mask alone."""

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__(num_heads)


class ALiBi(Position):
    """Every head loses slope * distance."""

    def __init__(self, num_heads: int, head_dim: int, slopes: Slopes = linear_slopes):
        super().__init__(num_heads, slopes(num_heads))


class NAPE(Position):
    """ALiBi on the first half of the heads, nothing on the rest; scalers touch only the rest."""

    def __init__(self, num_heads: int, head_dim: int, slopes: Slopes = linear_slopes):
        if num_heads < 2:
            raise ValueError(f"NAPE needs at least 2 heads, one of each kind, got {num_heads}")
        local = num_heads // 2
        all_slopes = torch.cat([slopes(local), torch.zeros(num_heads - local)])
        super().__init__(num_heads, all_slopes, all_slopes == 0)


class LlamaScaling(NamedTuple):
    """LLaMA-3's stretch of RoPE: slow rotations are slowed by `factor`, fast ones kept, those between blended.

    Slow and fast are judged by how many turns a frequency makes in `original_length` tokens.
    """

    factor: float
    original_length: int
    slow_turns: float = 1.0
    fast_turns: float = 4.0

    def apply(self, frequencies: Tensor) -> Tensor:
        turns = self.original_length * frequencies / (2 * math.pi)
        kept = ((turns - self.slow_turns) / (self.fast_turns - self.slow_turns)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


class RoPE(Position):
    """Rotary positions (Su et al. 2024), with an optional LLaMA-3 scaling."""

    frequencies: Tensor

    def __init__(self, num_heads: int, head_dim: int, base: float = 10_000.0, scaling: LlamaScaling | None = None):
        super().__init__(num_heads)
        if head_dim % 2:
            raise ValueError(f"RoPE needs an even head_dim, got {head_dim}")
        self.num_heads, self.head_dim, self.base, self.scaling = num_heads, head_dim, base, scaling
        frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        frequencies = scaling.apply(frequencies) if scaling else frequencies
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

    def rebased(self, base: float) -> "RoPE":
        """The same with another base: the adjusted base frequency (Xiong et al. 2024), for a trained model."""
        return RoPE(self.num_heads, self.head_dim, base, self.scaling).to(self.frequencies.device)

    def rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        # Angles in float64: at position 2^20 a float32 angle is off by 0.06.
        angles = positions.double()[..., None] * self.frequencies.double()  # (T, D/2) or (B, T, D/2)
        if positions.ndim == 2:
            angles = angles[:, None]
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


POSITIONS: dict[str, Callable[[int, int], Position]] = {
    "nope": NoPE,
    "alibi": ALiBi,
    "nape": NAPE,
    "rope": RoPE,
}


def position_named(name: str, num_heads: int, head_dim: int) -> Position:
    """The position of that name, with its defaults."""
    if name not in POSITIONS:
        raise ValueError(f"unknown position {name!r}; there are {', '.join(POSITIONS)}")
    return POSITIONS[name](num_heads, head_dim)
