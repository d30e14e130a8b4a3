"""Entmax attention on a CPU beside PyTorch's own softmax attention: forward, and forward plus backward.

    python benchmarks/attention_cpu.py [--lengths 1024 4096 16384 --heads 4 --dim 64 --rounds 5 --out FILE]

Causal, one sequence, float32. `noise`: Gaussian queries and keys. `topics`: runs of 128 tokens share one of 16
directions, as tokens of one subject would. `nape`: the same with ALiBi slopes 1/h on half of the heads, which softmax
is not given. After a second of warming up every round times every contender once, in turn; the table gives medians in
milliseconds, and in brackets how many times as fast as softmax.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from entmax_cpu import commit, machine
from torch import Tensor

import longspan

WARMING = 1.0  # seconds, of a kind, length and stage
KINDS = ("noise", "topics", "nape")
HERE = Path(__file__).resolve().parent
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def inputs(kind: str, heads: int, length: int, dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, length, dim, generator=generator).unbind()
    if kind != "noise":
        topics = 2 * torch.randn(heads, 16, dim, generator=generator)
        topic = torch.randint(16, (heads, -(-length // 128)), generator=generator).repeat_interleave(128, dim=1)
        shared = topics.gather(1, topic[:, :length, None].expand(-1, -1, dim))
        q, k = 0.5 * q + shared, 0.5 * k + shared
    return [q, k, v]


def contenders(kind: str, heads: int) -> dict[str, Attend]:
    slopes = None
    if kind == "nape":
        half = heads // 2
        slopes = torch.cat([1 / torch.arange(1, half + 1), torch.zeros(heads - half)])
    return {
        "longspan 1.5": lambda q, k, v: longspan.attention(q, k, v, slopes=slopes),
        "longspan 2": lambda q, k, v: longspan.attention(q, k, v, slopes=slopes, alpha=2.0),
        "SDPA softmax": lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
    }


def seconds(attend: Attend, tensors: list[Tensor], gradient: Tensor | None) -> float:
    own = [tensor.detach().requires_grad_(gradient is not None) for tensor in tensors]
    start = time.perf_counter()
    out = attend(*own)
    if gradient is not None:
        out.backward(gradient)
    return time.perf_counter() - start


def medians(kind: str, heads: int, length: int, dim: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds by contender, forward and forward plus backward."""
    tensors = inputs(kind, heads, length, dim)
    found: dict[str, dict[str, float]] = {}
    for stage, gradient in (("forward", None), ("both", torch.randn_like(tensors[2]))):
        times: dict[str, list[float]] = {}
        warm = time.perf_counter() + WARMING
        turns = 0
        while turns < rounds:
            measured = time.perf_counter() >= warm
            for name, attend in contenders(kind, heads).items():
                taken = seconds(attend, tensors, gradient)
                if measured:
                    times.setdefault(name, []).append(1e3 * taken)
            turns += measured
        for name, values in times.items():
            found.setdefault(name, {})[stage] = statistics.median(values)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "attention_cpu.jsonl")
    options = parser.parse_args()
    origin = {"command": shlex.join(["python", *sys.argv]), "commit": commit(), **machine()}
    shape = {"heads": options.heads, "dim": options.dim, "rounds": options.rounds}
    with options.out.open("a") as file:
        for length in options.lengths:
            for kind in KINDS:
                found = medians(kind, options.heads, length, options.dim, options.rounds)
                softmax = found["SDPA softmax"]
                for name, both in found.items():
                    row = {"contender": name, "kind": kind, "length": length, **shape, **both, **origin}
                    file.write(json.dumps(row) + "\n")
                    ratios = ", ".join(f"{softmax[stage] / both[stage]:.2f}" for stage in both)
                    print(f"{length:6} {kind:7} {name:13} {both['forward']:8.1f} / {both['both']:8.1f} ms  ({ratios})")
                file.flush()


if __name__ == "__main__":
    main()
