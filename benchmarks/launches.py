"""Other launches of the kernels for long rows, timed against the one in use: how those of `kernels/launches.py` are
chosen.

For one kernel after the other it tries other parts of a tile, warps, depths of the pipeline and limits of registers,
all else as it is, on the workloads of `benchmarks/attention.py`, and takes the
kernel's own time from a profile. A ratio below 1 is faster; the one in use is timed again beside each, since a GPU's
clock drifts. Launches that do not fit are left out, and so are those whose results differ. A launch takes some seconds
to compile, which `--processes` do ahead, side by side. `tiles` changes how many keys live or die together, and the
survey with them; the other kernels take such tiles in the parts they have. `--gluon` tries launches of the kernel's
namesake in Gluon instead.

    python benchmarks/launches.py --kernels key query --dims 64 --lengths 1024 4096 --kinds random topics4
"""

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import torch
from attention import kind_named, ours, workload
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from longspan.kernels import ops
from longspan.kernels.launches import Blocks, Launch, blocks_of
from longspan.results import append_rows, provenance

KERNELS = ("survey", "tiles", "solve", "output", "output_alone", "query", "key")
REGISTERS = (None, 128, 168)
OF_A_PROCESSOR = 65536  # registers
Cell = tuple[list[Tensor], Tensor | None]  # q, k and v; slopes
KEPT = {"query": 1, "output_alone": 1, "key": 2, "output": 2}  # sums as wide as a head, beside two tiles of scores


def launched(blocks: Blocks, kernel: str) -> Launch:
    in_gluon: Launch | None = getattr(blocks.hopper, kernel, None)
    launch: Launch = in_gluon or getattr(blocks, "survey" if kernel == "tiles" else kernel)
    return launch


def keys_together(blocks: Blocks, kernel: str) -> int:
    """How many keys of a tile a program of the keys' gradient has."""
    launch = launched(blocks, kernel)
    return 16 * launch.warps if launch.gluon and kernel == "key" else blocks.keys_at_once


def fits(blocks: Blocks, kernel: str, dim: int) -> bool:
    """Whether a launch's sums and scores may find room in registers, roughly."""
    launch = launched(blocks, kernel)
    rows = keys_together(blocks, kernel) if kernel == "key" else blocks.rows
    tiles = 2 if kernel in KEPT else 1
    numbers = rows * (KEPT.get(kernel, 0) * dim + tiles * launch.part) // (32 * launch.warps)
    limit = launch.registers or 255
    return numbers + 30 <= limit and 32 * launch.warps * (launch.registers or 0) <= OF_A_PROCESSOR


def votes_of(kernel: str) -> tuple[bool, ...]:
    """Without and with votes, for kernels that have a use for them."""
    return (False, True) if kernel in ("survey", "output") else (False,)


def others(blocks: Blocks, kernel: str, dim: int) -> Iterator[Blocks]:
    """Blocks that differ in one kernel's launch alone; of the keys' also in how many it takes at once."""
    now = launched(blocks, kernel)
    sizes = [keys for keys in (64, 128) if keys != blocks.keys] if kernel == "tiles" else [blocks.keys]
    for keys in sizes:
        parts = [keys] if kernel in ("survey", "tiles") else [part for part in (32, 64, 128) if part <= keys]
        at_once = [some for some in (64, 128) if some <= keys] if kernel == "key" else [blocks.keys_at_once]
        votes = votes_of(kernel)
        for part, warps, stages, registers, some, vote in product(parts, (4, 8), (2, 3), REGISTERS, at_once, votes):
            launch = Launch(part, warps, stages, registers, now.fused, votes=vote)
            name = "survey" if kernel == "tiles" else kernel
            changed = {name: launch, "keys": keys, "keys_at_once": some}
            tried = blocks._replace(**changed)  # type: ignore[arg-type]
            if tried != blocks and fits(tried, kernel, dim) and _holds_parts(tried):
                yield tried


def in_gluon(blocks: Blocks, kernel: str, dim: int) -> Iterator[Blocks]:
    """Blocks in which the kernel's namesake in Gluon takes its place."""
    parts = {"output": (blocks.keys // 2,), "output_alone": (blocks.keys // 2,), "query": (32, 64), "key": (32, 64)}
    sizes, votes = parts.get(kernel, (blocks.keys,)), votes_of(kernel)
    for part, warps, stages, registers, vote in product(sizes, (4, 8), (2, 3, 4), REGISTERS, votes):
        launch = Launch(part, warps, stages, registers, gluon=True, votes=vote)
        tried = blocks._replace(hopper=blocks.hopper._replace(**{kernel: launch}))
        if fits(tried, kernel, dim):
            yield tried


def _holds_parts(blocks: Blocks) -> bool:
    """Whether a tile is made up of whole parts for every kernel."""
    launches = (blocks.solve, blocks.output, blocks.output_alone, blocks.query)
    return all(launch.part <= blocks.keys for launch in launches) and blocks.keys_at_once <= blocks.keys


def work(inputs: list[Tensor], slopes: Tensor | None, backward: bool) -> list[Tensor]:
    """The output, with the gradients if wanted."""
    with torch.set_grad_enabled(backward):
        out = ours(slopes, 1.5)(*inputs)
        gradients = torch.autograd.grad(out, inputs, torch.ones_like(out)) if backward else ()
        return [out.detach(), *gradients]


def with_blocks(blocks: Blocks, inputs: list[Tensor], slopes: Tensor | None, backward: bool) -> list[Tensor]:
    tile = blocks.rows, blocks.keys
    with patch.object(ops, "blocks_of", lambda q, v: blocks), patch.object(ops, "tile_of", lambda q, v: tile):
        return work(inputs, slopes, backward)


def compile_ahead(blocks: Blocks, dim: int, backward: bool) -> None:
    """What is compiled stays in Triton's cache; a launch that fails will fail again, and say so, when it is timed."""
    with contextlib.suppress(Exception):
        inputs, slopes = workload("random", 256, dim)
        few = [tensor.detach()[:1].requires_grad_() for tensor in inputs]
        with_blocks(blocks, few, slopes, backward)


def microseconds(blocks: Blocks, kernel: str, cell: Cell, rounds: int) -> float:
    """The median time of the kernel; with other tiles, of all kernels together."""
    inputs, slopes = cell
    backward = has_gradients(kernel)
    with_blocks(blocks, inputs, slopes, backward)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(rounds):
            with_blocks(blocks, inputs, slopes, backward)
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in record.events() or ():
        times.setdefault(event.name, []).append(event.self_device_time_total)
    name = "output" if kernel == "output_alone" else kernel
    wanted = times if kernel == "tiles" else {f"{name}_kernel": times[f"{name}_kernel"]}
    return sum(statistics.median(found) for found in wanted.values())


def ratio(tried: Blocks, blocks: Blocks, kernel: str, cell: Cell, rounds: int) -> tuple[float, float]:
    """Microseconds of the tried one, and over those of the one in use."""
    inputs, slopes = cell
    wanted = with_blocks(blocks, inputs, slopes, has_gradients(kernel))
    for mine, theirs in zip(with_blocks(tried, inputs, slopes, has_gradients(kernel)), wanted, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.05, atol=0.02 * float(theirs.abs().max()))
    mine_us, now_us = (microseconds(each, kernel, cell, rounds) for each in (tried, blocks))
    return mine_us, mine_us / now_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--gluon", action="store_true", help="Launches of the kernels in Gluon.")
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--kinds", nargs="+", type=kind_named, default=["random", "topics4"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=0, help="So many compile ahead.")
    parser.add_argument("--minutes", type=float, default=math.inf, help="Try nothing new after so long.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/launches.jsonl"))
    arguments = parser.parse_args()
    if arguments.gluon and "tiles" in arguments.kernels:
        parser.error("--gluon has no other tiles: name --kernels without them")
    launches_of = in_gluon if arguments.gluon else others
    tries = {
        (dim, kernel): list(launches_of(blocks_for(dim, max(arguments.lengths)), kernel, dim))
        for dim, kernel in product(arguments.dims, arguments.kernels)
    }
    with ProcessPoolExecutor(max(1, arguments.processes), get_context("spawn")) as pool:
        waits: dict[tuple[int, str, Blocks], Future[None]] = {}
        if arguments.processes:
            for (dim, kernel), blocks in tries.items():
                for tried in blocks:
                    waits[dim, kernel, tried] = pool.submit(compile_ahead, tried, dim, has_gradients(kernel))
        try:
            run(arguments, tries, waits)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def blocks_for(dim: int, length: int) -> Blocks:
    some = torch.empty(1, 1, length, dim, dtype=torch.bfloat16, device="meta")
    return blocks_of(some, some)


def has_gradients(kernel: str) -> bool:
    return kernel != "output_alone"


def named(kernel: str, dim: int, tried: Blocks) -> str:
    launch = launched(tried, kernel)
    said = f"{kernel} {dim}{' in Gluon' if launch.gluon else ''}: part {launch.part}, {launch.warps} warps, "
    said += f"{launch.stages} stages, {launch.registers} registers, tiles of {tried.keys} keys"
    said += ", votes" if launch.votes else ""
    return said + (f", {keys_together(tried, kernel)} at once" if kernel == "key" else "")


def run(
    arguments: argparse.Namespace,
    tries: dict[tuple[int, str], list[Blocks]],
    waits: dict[tuple[int, str, Blocks], Future[None]],
) -> None:
    """Time every launch as soon as it is compiled, as long as there is time."""
    origin, begun = provenance("cuda"), time.monotonic()
    for (dim, kernel), launches in tries.items():
        cells = {
            (length, kind): workload(kind, length, dim) for length in arguments.lengths for kind in arguments.kinds
        }
        best: list[tuple[float, str]] = []
        for tried in launches:
            if time.monotonic() - begun > 60 * arguments.minutes:
                print("out of time: the rest is left out")
                break
            said = named(kernel, dim, tried)
            if (dim, kernel, tried) in waits:
                waits[dim, kernel, tried].result()
            try:
                found = {
                    cell: ratio(tried, blocks_for(dim, cell[0]), kernel, of_cell, arguments.rounds)
                    for cell, of_cell in cells.items()
                }
            except Exception as error:  # it does not fit, or does not compile: the next
                print(f"{said}: {str(error).splitlines()[0][:80]}", flush=True)
                continue
            for (length, kind), (mine, over) in found.items():
                row = {
                    "kernel": kernel,
                    "dim": dim,
                    "length": length,
                    "kind": kind,
                    "microseconds": mine,
                    "ratio": over,
                }
                row |= launched(tried, kernel)._asdict()
                row |= {"keys": tried.keys, "keys_at_once": keys_together(tried, kernel)}
                append_rows(arguments.out, [row | origin])
            mean = math.exp(statistics.mean(math.log(over) for _, over in found.values()))
            best.append((mean, said + ": " + ", ".join(f"{mine:.0f} ({over:.3f})" for mine, over in found.values())))
            print(best[-1][1], flush=True)
        print(f"{kernel} {dim}, the best on the average over {', '.join(f'{kind} {n}' for n, kind in cells)}:")
        for mean, said in sorted(best)[:5]:
            print(f"  {mean:.3f}  {said}", flush=True)


if __name__ == "__main__":
    main()
