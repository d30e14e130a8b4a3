"""Bytes that a thread of each long-row kernel spills as it is launched: `python count_spills.py`, without a GPU.

With `--gluon` those of the kernels in Gluon too that are not in use.

The assembler's own count. What does not fit the registers goes through memory, and a kernel that spills kilobytes is
several times slower while every result is right.
"""

import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from compile_kernels import ABOVE_2, KERNELS, SPARSE, compiled

from longspan.kernels import launches
from longspan.kernels.launches import Hopper, Launch, blocks_of

MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {"SLOPES": True, "DOCUMENTS": True},
    "lengths": {"LENGTHS": True, "MASK_ALL": True},
}
VARIANTS = {"edge": ABOVE_2["above_2"] | {"COLLECTED": True}, "hopper_output_alone": SPARSE["no_mean"]}


def spilled(name: str, options: dict[str, Any], launch: Launch) -> int:
    told = {key: value for key, value in launch.options().items() if key != "DEPTH"}
    ptx = compiled(KERNELS[name][0], options | {"PART": launch.part, "DEPTH": launch.stages}, told).asm["ptx"]
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    limit = [] if launch.registers is None else [f"--maxrregcount={launch.registers}"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [str(assembler), "-v", "-arch=sm_90a", str(path), "-o", str(Path(folder) / "out"), *limit]
        assembled = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "serialized" not in assembled, assembled  # products that were to be under way together
    found = re.search(r"(\d+) bytes spill stores", assembled)
    assert found, assembled
    return int(found[1])


def main() -> None:
    if "--gluon" in sys.argv:
        launches.ON_HOPPER = frozenset(Hopper._fields)
    counted = set()
    for dim, length in product((64, 128), (1024, 8192)):
        q = torch.empty(1, 1, length, dim, dtype=torch.bfloat16, device="meta")
        blocks = blocks_of(q, q)
        sizes = {"M": blocks.rows, "N": blocks.keys, "BLOCK_D": dim, "BLOCK_DV": dim, "COLLECTED": False}
        asked = {name: getattr(blocks, name) for name in ("survey", "solve", "output", "query", "key")}
        asked |= {"edge": blocks.collect}
        asked |= {f"hopper_{name}": launch for name, launch in blocks.hopper._asdict().items() if launch}
        for masks, (name, launch) in product(MASKS, asked.items()):
            if (dim, masks, name, launch) in counted:
                continue
            counted.add((dim, masks, name, launch))
            options = sizes | {"KEYS": 16 * launch.warps if launch.gluon else blocks.keys_at_once}
            options |= VARIANTS.get(name, {}) | MASKS[masks]
            kernel = name.removesuffix("_alone")
            print(spilled(kernel, options, launch), name, dim, masks, launch, flush=True)


if __name__ == "__main__":
    main()
