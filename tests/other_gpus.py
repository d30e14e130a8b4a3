"""Compiles the kernels as they are launched for GPUs that are not here: `python other_gpus.py 80 86 100 120`.

Prints what does not compile or asks for more shared memory than a program may have. `--few` takes a dozen kernels for a
hundred. Triton's interpreter off.
"""

import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import compile_kernels
import torch
from compile_kernels import ABOVE_2, KERNELS, SPARSE, compiled
from triton.backends.compiler import GPUTarget

from longspan.kernels import gpus, launches, short
from longspan.kernels.decode_ops import GATHERED, PAGES_HELD, ROW, SCORE, VALUE, boxes_at_once

SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}  # bytes, by CUDA's documentation
ALL = {"SLOPES": True, "DOCUMENTS": True, "LENGTHS": True}
Called = tuple[str, dict[str, Any], dict[str, Any]]  # a kernel's name, its constants, the compiler's options


def in_dtype(dtype: torch.dtype) -> dict[str, Any]:
    return {"PRECISION": "ieee"} if dtype == torch.float32 else {}


def widest(dtype: torch.dtype) -> int:
    """Dims of the widest heads that the kernels take: `too_wide`."""
    return 128 if dtype == torch.float32 and not gpus.is_roomy(torch.device("cuda")) else 256


def of_long_rows(dim: int, dtype: torch.dtype, length: int) -> Iterator[Called]:
    q = torch.empty(1, 1, length, dim, dtype=dtype, device="meta")
    blocks = launches.blocks_of(q, q)
    sizes: dict[str, Any] = {
        "M": blocks.rows,
        "N": blocks.keys,
        "BLOCK_D": dim,
        "BLOCK_DV": dim,
        "KEYS": blocks.keys_at_once,
    }
    sizes |= ALL | {"COLLECTED": False}
    if dtype == torch.float32:
        sizes |= {"PRECISION": "ieee", "REFINE": True, "KIND": -2, "GUESS": False}
    for name in ("survey", "solve", "output", "query", "key"):
        launch = getattr(blocks, name)
        yield name, sizes | {"PART": launch.part}, launch.options()
    alone = blocks.output_alone
    yield "output", sizes | SPARSE["no_mean"] | {"PART": alone.part}, alone.options()
    for name in ("query", "key"):
        launch = getattr(blocks, name)
        yield name, sizes | {"KIND": 0, "PART": launch.part}, launch.options()
    yield "softmax", sizes, blocks.output.options()
    above = sizes | ABOVE_2["above_2"] | {"PART": blocks.collect.part}
    yield "collect", {name: value for name, value in above.items() if name != "COLLECTED"}, blocks.collect.options()
    yield "edge", above | {"COLLECTED": True}, blocks.collect.options()
    yield "root", {"M": blocks.rows, "CAP": 64, "AT_ONCE": 16}, {"num_warps": 4}


def of_short_rows(keys: int, dim: int, dtype: torch.dtype) -> Iterator[Called]:
    sizes: dict[str, Any] = ALL | {"SCALES": True, "BLOCK_D": dim, "BLOCK_DV": dim}
    sizes |= in_dtype(dtype)
    kernels = {"short_forward": short.forward_blocks(keys), "short_backward": short.backward_blocks(keys, dim)}
    for name, blocks in kernels.items():
        yield name, sizes | {"M": blocks["M"], "N": blocks["N"]}, {"num_warps": blocks["num_warps"]}


def of_one_pass(dim: int, dtype: torch.dtype) -> Iterator[Called]:
    rows = 32 if dim > 128 or dtype == torch.float32 else 64
    sizes = ALL | in_dtype(dtype) | {"M": rows, "N": rows, "BLOCK_D": dim, "BLOCK_DV": dim}
    yield "stick", sizes, {"num_warps": 4}
    for places in (1, 32, 64):
        yield "topk", sizes | {"PLACES": places}, {"num_warps": 4}


def of_decoding(dim: int, dtype: torch.dtype, tile: int, early: bool) -> Iterator[Called]:
    sizes = {"LENGTHS": True, "STARTS": True, "EARLY": early, "CHUNK": 64, "BLOCK_D": dim, "BLOCK_DV": dim}
    sizes |= in_dtype(dtype)
    probing: dict[str, Any] = {
        "CHUNK": boxes_at_once(torch.device("cuda")),
        "M": max(tile, 16),
        "SLOPES": True,
        "SCALES": True,
        "NORMS": True,
        "BOXES": True,
        "PROBES": 8,
    }
    yield "bound", sizes | probing, {"num_warps": 4, "num_stages": 2}
    score = sizes | {"M": tile, "SLOPES": True, "SCALES": True, "NORMS": True}
    registers = 128 if tile <= 16 else None
    yield "score", score, {"num_warps": SCORE.warps, "num_stages": SCORE.stages, "maxnreg": registers}
    stages = 2 * SCORE.stages
    yield "score", score | {"PAGED": True}, {"num_warps": SCORE.warps, "num_stages": stages, "maxnreg": registers}
    if tile >= 16:
        warps = VALUE.warps * (1 + (tile > 32))
        yield "value", sizes | {"M": tile}, {"num_warps": warps, "num_stages": VALUE.stages}
    if tile == 16:
        held = {"CHUNK": 4096, "AT_ONCE": PAGES_HELD, "GATHER": GATHERED // (dtype.itemsize * dim)}
        yield "row", sizes | held, {"num_warps": ROW.warps}


def few_calls() -> Iterator[Called]:
    """Enough to see what a kind of GPU makes of the kernels."""
    yield from of_long_rows(64, torch.bfloat16, 1024)
    yield from of_short_rows(256, 32, torch.bfloat16)


def all_calls(arch: int) -> Iterator[Called]:
    for dim, length in product((64, 128, 256), (1024, 8192)):
        yield from of_long_rows(dim, torch.bfloat16, length)
    for keys, dim in ((64, 32), (256, 32), (128, 64)):
        yield from of_short_rows(keys, dim, torch.bfloat16)
        yield from of_short_rows(keys if gpus.is_roomy(torch.device("cuda")) else keys // 2, dim, torch.float32)
    for dtype, dim in product((torch.bfloat16, torch.float32), (64, 128, 256)):
        if dim > widest(dtype):
            continue
        if dtype == torch.float32:
            yield from of_long_rows(dim, dtype, 8192)
        yield from of_one_pass(dim, dtype)
        for tile in (8, 16, 64) if dim >= 128 else ():
            if tile * dim * dtype.itemsize <= 1 << 15:  # else a tile has half as many rows: `shape_of`
                yield from of_decoding(dim, dtype, tile, early=arch >= 90)


def wrong_for(arch: int, calls: Iterator[Called]) -> int:
    """How many kernels are wrong for a GPU of this compute capability."""
    compile_kernels.TARGET = GPUTarget("cuda", arch, 32)
    gpus.TENSOR_MEMORY.value = arch // 10 == 10
    gpus.is_roomy = lambda device: SHARED[arch] >= gpus.ROOMY
    wrong, seen = 0, []
    for call in calls:
        if call in seen:
            continue
        seen.append(call)
        name, constants, options = call
        try:
            shared = compiled(KERNELS[name][0], constants, options).metadata.shared
            trouble = f"asks for {shared:,} bytes of {SHARED[arch]:,}" if shared > SHARED[arch] else ""
        except Exception as error:  # whatever a compiler dies of
            trouble = f"does not compile: {str(error)[-200:]}"
        if trouble:
            wrong += 1
            print(f"sm_{arch}: {name} {trouble}: {constants} {options}", flush=True)
    print(f"sm_{arch}: {len(seen)} kernels, {wrong} wrong", flush=True)
    return wrong


def main(arguments: list[str]) -> int:
    few = "--few" in arguments
    archs = [int(each) for each in arguments if each != "--few"]
    return sum(wrong_for(arch, few_calls() if few else all_calls(arch)) for arch in archs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
