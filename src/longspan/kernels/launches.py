"""How the kernels of long rows are launched: what of a tile they take at a time, by how many threads."""

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.kernels import gpus
from longspan.kernels.tiles import padded

# The kernels in Gluon that are in use, by their names in `Hopper`. None has been timed yet.
ON_HOPPER: frozenset[str] = frozenset()


class Launch(NamedTuple):
    """How a kernel runs: the keys or queries it takes at a time, its warps, the depth of its pipeline, the most
    registers of a thread, so that two or more blocks of threads share a processor and hide each other's waits, and
    whether a product and a sum may be rounded once. Where they may, ties come apart: a score less the maximum is 0 in
    a tile that is masked, and half a digit of the score in one that is not. Whether the kernel is that in Gluon; and
    whether its threads vote on what they all must know, see `votes.py`."""

    part: int
    warps: int
    stages: int
    registers: int | None = None
    fused: bool = True
    gluon: bool = False
    votes: bool = False

    def options(self, may_fuse: bool = True) -> dict[str, int | None]:
        return {
            "num_warps": self.warps,
            "DEPTH" if self.gluon else "num_stages": self.stages,
            "maxnreg": self.registers,
            "enable_fp_fusion": self.fused and may_fuse,
        }


class Hopper(NamedTuple):
    """Launches of the kernels in Gluon that take the place of their namesakes where they can."""

    survey: Launch | None = None
    solve: Launch | None = None
    output: Launch | None = None
    output_alone: Launch | None = None
    query: Launch | None = None
    key: Launch | None = None


class Blocks(NamedTuple):
    """Rows of a block of queries and keys of a tile, which live or die together, and how each kernel takes them."""

    rows: int
    keys: int
    survey: Launch
    collect: Launch  # of candidates, and of the edges of rows that have too many
    solve: Launch
    output: Launch
    output_alone: Launch  # without the mean
    query: Launch
    key: Launch
    keys_at_once: int  # of a tile, in the kernel of the keys
    hopper: Hopper = Hopper()


def tile_of(q: Tensor, v: Tensor) -> tuple[int, int]:
    """Rows of a block of queries and keys of a tile, by the width of a head."""
    width = max(padded(q.shape[3]), padded(v.shape[3]))
    if q.dtype == torch.float32:
        return (64 if width <= 64 else 32), 32
    return (128, 128) if width <= 128 else (64, 64)


def blocks_of(q: Tensor, v: Tensor) -> Blocks:
    """What fits the registers and the shared memory of the GPU."""
    blocks = blocks_of_hopper(q, v)
    return blocks if gpus.is_roomy(q.device) else with_less_memory(blocks)


def with_less_memory(blocks: Blocks) -> Blocks:
    """For GPUs whose programs have 99 KB of shared memory: less fetched ahead, and of wide heads less at a time.

    By the compiler's count of bytes (`tests/other_gpus.py`); not timed.
    """
    stages, part = (1, 16) if blocks.rows == blocks.keys == 64 else (2, 64)
    named = ("survey", "collect", "solve", "output", "output_alone", "query", "key")
    blocks = blocks._replace(**{name: _shallow(getattr(blocks, name), 2) for name in named})
    return blocks._replace(
        output=_shallow(blocks.output, stages),  # softmax's too
        query=blocks.query._replace(part=min(blocks.query.part, part)),
        key=blocks.key._replace(part=min(blocks.key.part, part)),
    )


def _shallow(launch: Launch, stages: int) -> Any:
    return launch._replace(stages=min(launch.stages, stages))


def blocks_of_hopper(q: Tensor, v: Tensor) -> Blocks:
    """What fits Hopper's, by the width of a head; of what fits, what is fastest at this length."""
    width, length = max(padded(q.shape[3]), padded(v.shape[3])), q.shape[2]
    rows, keys = tile_of(q, v)
    if q.dtype == torch.float32:
        launch = Launch(32, 4, 2, fused=False)
        return Blocks(rows, keys, launch, launch, launch, launch, launch, launch, launch, 32)
    collect = Launch(64, 8, 2, 128)
    if width <= 64:
        survey = Launch(128, 8, 2, 128) if length <= 2048 else Launch(128, 4, 3)
        output, shared = Launch(128, 8, 3), Launch(64, 8, 3, 128)
        solve, key = Launch(64, 4, 3, 168), Launch(64, 4, 3)
        return Blocks(rows, keys, survey, collect, solve, output, shared, shared, key, 64, on_hopper(q, v))
    if width <= 128:
        square, wide = Launch(128, 8, 2, 128), Launch(64, 8, 3)
        alone = Launch(32, 8, 3, 128) if length <= 4096 else wide
        query = Launch(32, 8, 3, 128) if length <= 2048 else wide
        key = Launch(64, 4, 2)
        return Blocks(rows, keys, square, collect, square, wide, alone, query, key, 64, on_hopper(q, v))
    wide = Launch(32, 8, 2)
    return Blocks(rows, keys, Launch(64, 8, 2), Launch(64, 4, 2), Launch(64, 8, 2), wide, wide, wide, wide, 64)


def with_votes(blocks: Blocks) -> Blocks:
    """The same with votes in the kernels that have a use for them. Not timed yet."""
    named = ("survey", "output")
    return blocks._replace(**{name: getattr(blocks, name)._replace(votes=True) for name in named})


def on_hopper(q: Tensor, v: Tensor) -> Hopper:
    """Those of ON_HOPPER, by the width of a head."""
    if q.dtype.itemsize != 2 or max(padded(q.shape[3]), padded(v.shape[3])) > 128:
        return Hopper()
    narrow = max(padded(q.shape[3]), padded(v.shape[3])) <= 64
    shared = Launch(128, 8, 3 if narrow else 2, 128, gluon=True)
    halves = Launch(64, 8, 2, gluon=True, votes=True)
    every = Hopper(
        survey=shared._replace(votes=True),
        solve=shared,
        output=halves,
        output_alone=halves,
        query=Launch(64, 8, 3, 128 if narrow else None, gluon=True),
        key=Launch(64, 4 if narrow else 8, 3, gluon=True),
    )
    return every._replace(**{name: None for name in every._fields if name not in ON_HOPPER})


def gluon_kernel(name: str) -> Any:
    """A kernel in Gluon, imported when it is used: an experiment of Triton's, which its next release may change."""
    return getattr(import_module(f"longspan.kernels.hopper.{name}"), f"{name}_kernel")


def serves_hopper(*inputs: Tensor) -> bool:
    """Whether kernels in Gluon can read these: they copy 16 bytes at a time, from places divisible by that.

    On a CPU stand-ins run in Triton's interpreter.
    """
    if not inputs[0].is_cuda:
        return True
    whole = all(
        each.stride(3) == 1 and all(size % 16 == 0 for size in (each.shape[3], *each.stride()[:3], each.data_ptr()))
        for each in inputs
    )
    return whole and torch.cuda.get_device_capability(inputs[0].device) == (9, 0)
