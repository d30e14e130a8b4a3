"""Other launches of the kernels for long rows, timed against the one in use: how those in `kernels/ops.py` are chosen.

For one kernel after the other it tries other parts of a tile, warps, depths of the pipeline and limits of registers,
all else as it is, on the workloads of `benchmarks/attention.py`. A ratio below 1 is faster; the one in use is timed
again beside each, since a GPU's clock drifts. Launches that do not fit are left out, and so are those whose results
differ. A launch takes some seconds to compile. `tiles` changes how many keys live or die together, and the survey with
them; the other kernels take such tiles in the parts they have.

    python benchmarks/launches.py --kernels key query --dims 64 --lengths 1024 4096 --kinds random topics4
"""

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
from attention import kind_named, milliseconds, ours, workload
from torch import Tensor

from longspan.kernels import ops
from longspan.kernels.ops import Blocks, Launch
from longspan.results import append_rows, provenance

KERNELS = ("survey", "tiles", "solve", "output", "output_alone", "query", "key")
REGISTERS = (None, 128, 168)
OF_A_PROCESSOR = 65536  # registers
HELD = {"query": 1, "output_alone": 1, "key": 2, "output": 2}  # sums as wide as a head, beside two tiles of scores


def launched(blocks: Blocks, kernel: str) -> Launch:
    launch: Launch = getattr(blocks, "survey" if kernel == "tiles" else kernel)
    return launch


def fits(blocks: Blocks, kernel: str, dim: int) -> bool:
    """Whether a launch's sums and scores may find room in registers, roughly."""
    launch = launched(blocks, kernel)
    rows = blocks.keys_at_once if kernel == "key" else blocks.rows
    tiles = 2 if kernel in HELD else 1
    numbers = rows * (HELD.get(kernel, 0) * dim + tiles * launch.part) // (32 * launch.warps)
    limit = launch.registers or 255
    return numbers + 30 <= limit and 32 * launch.warps * (launch.registers or 0) <= OF_A_PROCESSOR


def others(blocks: Blocks, kernel: str, dim: int) -> Iterator[Blocks]:
    """Blocks that differ in one kernel's launch alone; of the keys' also in how many it takes at once."""
    now = launched(blocks, kernel)
    sizes = [keys for keys in (64, 128) if keys != blocks.keys] if kernel == "tiles" else [blocks.keys]
    for keys in sizes:
        parts = [keys] if kernel in ("survey", "tiles") else [part for part in (32, 64, 128) if part <= keys]
        at_once = [some for some in (64, 128) if some <= keys] if kernel == "key" else [blocks.keys_at_once]
        for part, warps, stages, registers, some in product(parts, (4, 8), (2, 3), REGISTERS, at_once):
            launch = Launch(part, warps, stages, registers, now.fused)
            name = "survey" if kernel == "tiles" else kernel
            tried = blocks._replace(**{name: launch, "keys": keys, "keys_at_once": some})  # type: ignore[arg-type]
            if tried != blocks and fits(tried, kernel, dim) and _holds_parts(tried):
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
    with patch.object(ops, "blocks_of", lambda q, v: blocks):
        return work(inputs, slopes, backward)


def ratio(
    tried: Blocks, blocks: Blocks, inputs: list[Tensor], slopes: Tensor | None, backward: bool, rounds: int
) -> tuple[float, float]:
    """Milliseconds of the tried one, and over those of the one in use, by medians of turns."""
    wanted = with_blocks(blocks, inputs, slopes, backward)
    for mine, theirs in zip(with_blocks(tried, inputs, slopes, backward), wanted, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.05, atol=0.02 * float(theirs.abs().max()))
    times: dict[Blocks, list[float]] = {tried: [], blocks: []}
    for _ in range(rounds):
        for each, found in times.items():
            found.append(milliseconds(partial(with_blocks, each, inputs, slopes, backward), 3))
    tried_ms, now_ms = (statistics.median(found) for found in times.values())
    return tried_ms, tried_ms / now_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--kinds", nargs="+", type=kind_named, default=["random", "topics4"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=math.inf, help="Try nothing new after so long.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/launches.jsonl"))
    arguments = parser.parse_args()
    origin, begun = provenance("cuda"), time.monotonic()
    for dim, kernel in product(arguments.dims, arguments.kernels):
        cells = {
            (length, kind): workload(kind, length, dim) for length in arguments.lengths for kind in arguments.kinds
        }
        inputs, _ = next(iter(cells.values()))
        blocks = ops.blocks_of(inputs[0], inputs[2])
        best: list[tuple[float, str]] = []
        for tried in others(blocks, kernel, dim):
            if time.monotonic() - begun > 60 * arguments.minutes:
                print("out of time: the rest is left out")
                break
            launch = launched(tried, kernel)
            said = f"{kernel} {dim}: part {launch.part}, {launch.warps} warps, {launch.stages} stages, "
            said += f"{launch.registers} registers" + (f", {tried.keys_at_once} keys" if kernel == "key" else "")
            try:
                found = {
                    cell: ratio(tried, blocks, *of_cell, backward=kernel != "output_alone", rounds=arguments.rounds)
                    for cell, of_cell in cells.items()
                }
            except Exception as error:  # it does not fit, or does not compile: the next
                print(f"{said}: {str(error).splitlines()[0][:80]}", flush=True)
                continue
            for (length, kind), (mine, over) in found.items():
                row = {"kernel": kernel, "dim": dim, "length": length, "kind": kind, **launch._asdict()}
                row |= {"keys": tried.keys, "keys_at_once": tried.keys_at_once, "ms": mine, "ratio": over}
                append_rows(arguments.out, [row | origin])
            mean = math.exp(statistics.mean(math.log(over) for _, over in found.values()))
            best.append((mean, said + ": " + ", ".join(f"{over:.3f}" for _, over in found.values())))
            print(best[-1][1], flush=True)
        print(f"{kernel} {dim}, the best on the average over {', '.join(f'{kind} {n}' for n, kind in cells)}:")
        for mean, said in sorted(best)[:5]:
            print(f"  {mean:.3f}  {said}", flush=True)


if __name__ == "__main__":
    main()
