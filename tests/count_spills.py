"""Bytes that a thread of each long-row kernel spills as it is launched: `python count_spills.py`, without a GPU.

The assembler's own count. What does not fit the registers goes through memory, and a kernel that spills kilobytes is
several times slower while every result is right.
"""

import re
import subprocess
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from compile_kernels import KERNELS, compiled

from longspan.kernels.ops import Launch, blocks_of

MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {"SLOPES": True, "DOCUMENTS": True},
    "lengths": {"LENGTHS": True, "MASK_ALL": True},
}


def spilled(name: str, options: dict[str, Any], launch: Launch) -> int:
    ptx = compiled(KERNELS[name][0], options | {"PART": launch.part}, launch.options()).asm["ptx"]
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    limit = [] if launch.registers is None else [f"--maxrregcount={launch.registers}"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [str(assembler), "-v", "-arch=sm_90a", str(path), "-o", str(Path(folder) / "out"), *limit]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.search(r"(\d+) bytes spill stores", told)
    assert found, told
    return int(found[1])


def main() -> None:
    counted = set()
    for dim, length in product((64, 128), (1024, 8192)):
        q = torch.empty(1, 1, length, dim, dtype=torch.bfloat16, device="meta")
        blocks = blocks_of(q, q)
        sizes = {"M": blocks.rows, "N": blocks.keys, "KEYS": blocks.keys_at_once}
        sizes |= {"BLOCK_D": dim, "BLOCK_DV": dim}
        for masks, name in product(MASKS, ("survey", "solve", "edge", "output", "query", "key")):
            launch = blocks.collect if name == "edge" else getattr(blocks, name)
            kind = KERNELS["edge"][1]["above_2"] if name == "edge" else {"COLLECTED": False}
            if (dim, masks, name, launch) not in counted:
                counted.add((dim, masks, name, launch))
                print(spilled(name, sizes | MASKS[masks] | kind, launch), name, dim, masks, launch, flush=True)


if __name__ == "__main__":
    main()
