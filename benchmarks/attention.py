"""Milliseconds of exact entmax attention on a GPU against its peers: flash, cuDNN and flex attention, AdaSplash.

Causal, bf16, 16 heads, 16K tokens a batch (one sequence where it is longer). Workloads:

    random   Gaussian q and k: nearly every tile has a survivor
    topics4  blocks of 128 tokens share one of 4 topics: about 3/4 of the tiles have none
    topics16 the same with 16 topics; any number up to the width of a head can be asked for
    nape     topics16, half the heads with ALiBi slopes 1/h

Each time is the median over rounds in which the implementations take turns, of work on the GPU alone: launches are
queued behind a pause, so that the host's speed does not enter. Softmax peers compute another function; they are there
as the clock to beat. Peers that are not installed are left out; `adasplash` tunes itself for minutes per length.

    python benchmarks/attention.py --dims 64 --lengths 4096 16384 --plot docs/kernels/time.png
    python benchmarks/attention.py --dims 64 --lengths 16384 --kinds random topics{2,4,8,16,32} --peers flash \
        --plot-sparsity docs/kernels/sparsity.png
    python benchmarks/attention.py --lengths --plot docs/kernels/time.png    # the figures alone, from the rows
"""

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import longspan
from longspan.results import Row, append_rows, provenance, read_rows

HEADS, TOKENS, BLOCK = 16, 1 << 14, 128
KINDS = ("random", "topics4", "topics16", "nape")
VARIANTS = ("gluon", "votes")  # `kernels/hopper`, and `kernels/votes.py` for the kernels of Triton
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def workload(kind: str, length: int, dim: int, seed: int = 0) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v of (batch, heads, length, dim), and slopes."""
    generator = torch.Generator("cuda").manual_seed(seed)
    batch = max(1, TOKENS // length)
    q, k, v = (torch.randn(batch, HEADS, length, dim, device="cuda", generator=generator) for _ in range(3))
    if kind != "random":
        topics = int(kind.removeprefix("topics")) if kind != "nape" else 16
        if not 1 <= topics <= dim:
            raise ValueError(f"{kind}: heads of {dim} have room for 1 to {dim} topics")
        directions = torch.linalg.qr(torch.randn(dim, dim, device="cuda", generator=generator))[0][:topics]
        of_block = torch.randint(topics, (batch, HEADS, math.ceil(length / BLOCK)), device="cuda", generator=generator)
        of_token = of_block.repeat_interleave(BLOCK, -1)[..., :length]
        shared = directions[of_token] * (10 * math.sqrt(dim)) ** 0.5  # adds 10 to the scores within a topic
        q, k = q + shared, k + shared
    slopes = None
    if kind == "nape":
        slopes = torch.cat([1 / torch.arange(1, HEADS // 2 + 1), torch.zeros(HEADS - HEADS // 2)]).cuda()
    return [tensor.bfloat16().requires_grad_() for tensor in (q, k, v)], slopes


def kind_named(text: str) -> str:
    """A workload's name, checked."""
    if text not in KINDS and not (text.startswith("topics") and text.removeprefix("topics").isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(KINDS)} or topics with a number")
    return text


def ours(slopes: Tensor | None, alpha: float) -> Attend:
    return lambda q, k, v: longspan.attention(q, k, v, alpha=alpha, slopes=slopes, impl="triton")


@contextlib.contextmanager
def kernels_of(name: str) -> Iterator[None]:
    """While an implementation of this name runs, its backward included: the kernels in use, or a variant of them."""
    from longspan.kernels import launches, ops

    with contextlib.ExitStack() as stack:
        if name.endswith(" gluon"):
            stack.enter_context(patch.object(launches, "ON_HOPPER", frozenset(launches.Hopper._fields)))
        if name.endswith(" votes"):
            voting = lambda q, v: launches.with_votes(launches.blocks_of(q, v))  # noqa: E731
            stack.enter_context(patch.object(ops, "blocks_of", voting))
        yield


def sdpa(backend: SDPBackend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def flex_with_alibi(slopes: Tensor, length: int) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i - j)

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, score_mod=biased, block_mask=mask)


def adasplash() -> Attend:
    from adasplash import adasplash as attend  # type: ignore[import-not-found]

    return lambda q, k, v: attend(q, k, v, alpha=1.5, is_causal=True)


def implementations(
    slopes: Tensor | None, length: int, alphas: list[float], peers: list[str], variants: list[str]
) -> dict[str, Attend]:
    found = {f"entmax {alpha:g}" if alpha > 1 else "softmax, ours": ours(slopes, alpha) for alpha in alphas}
    entmax = [name for name in found if name.startswith("entmax")]
    found |= {f"{name} {variant}": found[name] for name in entmax for variant in variants}
    if "flash" in peers:
        found["flash"] = sdpa(SDPBackend.FLASH_ATTENTION)
    if "cudnn" in peers:
        found["cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION)
    if "flex" in peers and slopes is not None:
        found["flex"] = flex_with_alibi(slopes, length)
    if "adasplash" in peers and slopes is None:
        try:
            found["adasplash"] = adasplash()
        except ImportError as error:
            print(f"adasplash is left out: {error}")
    return found


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def measure(attend: dict[str, Attend], inputs: list[Tensor], rounds: int) -> dict[str, tuple[float, float]]:
    """Forward, and forward with backward, by name; NaN for those that fail."""
    direction = torch.randn_like(inputs[2])
    times: dict[str, tuple[list[float], list[float]]] = {}

    def both(function: Attend) -> None:
        torch.autograd.grad(function(*inputs), inputs, direction)

    def forward(function: Attend) -> None:
        with torch.no_grad():
            function(*inputs)

    for name, function in attend.items():
        try:
            with kernels_of(name):
                for _ in range(2):
                    both(function)
                    forward(function)
                torch.cuda.synchronize()
            times[name] = [], []
        except Exception as error:  # a peer that cannot run this cell leaves the others alone
            print(f"  {name}: {str(error).splitlines()[0][:120]}")
    for _ in range(rounds):
        for name in times:
            pair = times[name]
            with kernels_of(name):
                pair[0].append(milliseconds(partial(forward, attend[name]), 3))
                pair[1].append(milliseconds(partial(both, attend[name]), 3))
    return {name: (statistics.median(pair[0]), statistics.median(pair[1])) for name, pair in times.items()}


def memory(function: Attend, inputs: list[Tensor]) -> float:
    """Peak MiB of a forward and backward beyond its inputs."""
    direction = torch.randn_like(inputs[2])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(function(*inputs), inputs, direction)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--lengths", nargs="*", type=int, default=[1024, 4096, 16384, 65536])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), type=kind_named)
    parser.add_argument("--alphas", nargs="+", type=float, default=[1.5])
    parser.add_argument("--peers", nargs="*", default=["flash", "cudnn", "flex", "adasplash"])
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=[], help="Of our kernels, timed too.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=math.inf, help="Start no new cell after so long.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/attention.jsonl"))
    parser.add_argument("--plot", type=Path, help="Draw the rows of --out into this file.")
    parser.add_argument("--plot-sparsity", type=Path, help="Draw times against the share of dead tiles into this file.")
    arguments = parser.parse_args()
    if arguments.lengths:
        run(arguments)
    if arguments.plot:
        draw(list(read_rows(arguments.out)), arguments.plot)
    if arguments.plot_sparsity:
        draw_sparsity(list(read_rows(arguments.out)), arguments.plot_sparsity)


def run(arguments: argparse.Namespace) -> None:
    """Measure and write every cell, as long as there is time."""
    origin, begun = provenance("cuda"), time.monotonic()
    print(f"{'dim':>4} {'length':>7} {'kind':9} {'':17} {'forward':>9} {'+backward':>10} {'MiB':>7} {'dead tiles':>10}")
    for dim in arguments.dims:
        for length in arguments.lengths:
            for kind in arguments.kinds:
                if time.monotonic() - begun > 60 * arguments.minutes:
                    print("out of time: the rest is left out")
                    return
                inputs, slopes = workload(kind, length, dim)
                attend = implementations(slopes, length, arguments.alphas, arguments.peers, arguments.variants)
                for name, (forward, both) in measure(attend, inputs, arguments.rounds).items():
                    row: Row = {"dim": dim, "length": length, "kind": kind, "name": name}
                    with kernels_of(name):
                        row |= {"forward_ms": forward, "both_ms": both, "mebibytes": memory(attend[name], inputs)}
                    dead = ""
                    if name.startswith("entmax"):
                        stats = longspan.attention(
                            *(tensor.detach() for tensor in inputs),
                            alpha=float(name.split()[1]),
                            slopes=slopes,
                            impl="triton",
                            return_stats=True,
                        )[1]
                        assert stats.block_sparsity is not None
                        row |= {"support": float(stats.support.float().mean())}
                        row |= {"block_sparsity": float(stats.block_sparsity.mean())}
                        dead = f"{100 * row['block_sparsity']:.0f} %"
                    append_rows(arguments.out, [row | origin])
                    print(
                        f"{dim:4} {length:7} {kind:9} {name:17} {forward:9.3f} {both:10.3f} "
                        f"{row['mebibytes']:7.0f} {dead:>10}",
                        flush=True,
                    )


def draw(rows: list[Row], path: Path) -> None:
    """Forward and backward time of what was timed at several lengths, a panel for each head width and workload."""
    import matplotlib.pyplot as plt

    dims, kinds = sorted({row["dim"] for row in rows}), [kind for kind in KINDS if any(r["kind"] == kind for r in rows)]
    figure, axes = plt.subplots(len(dims), len(kinds), figsize=(3.2 * len(kinds), 3 * len(dims)), squeeze=False)
    names = list(dict.fromkeys(row["name"] for row in rows))
    for line, dim in enumerate(dims):
        for column, kind in enumerate(kinds):
            axis = axes[line][column]
            for number, name in enumerate(names):
                points = {
                    r["length"]: r["both_ms"] for r in rows if (r["dim"], r["kind"], r["name"]) == (dim, kind, name)
                }
                if len(points) > 1:
                    axis.loglog(*zip(*sorted(points.items()), strict=True), "o-", color=f"C{number}", label=name)
            axis.set_title(f"{kind}, heads of {dim}", fontsize=10)
            axis.set_xlabel("length")
            lengths = sorted({r["length"] for r in rows if (r["dim"], r["kind"]) == (dim, kind)})
            axis.set_xticks(lengths, [f"{length >> 10}K" for length in lengths], minor=False)
            axis.minorticks_off()
    axes[0][0].set_ylabel("ms, forward + backward")
    handles = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=len(handles), frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=150)


def draw_sparsity(rows: list[Row], path: Path) -> None:
    """Our time over flash's of the same commit against the share of dead tiles, and what the count of products says."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True)
    panels = (("forward_ms", "forward", 1, 4, 2), ("both_ms", "forward and backward", 1, 11, 7))
    for axis, (field, title, always, live, softmax) in zip(axes, panels, strict=True):
        for number, length in enumerate((16384, 65536)):
            cells = {(r["commit"], r["kind"], r["name"]): r for r in rows if (r["dim"], r["length"]) == (64, length)}
            points = [
                (100 * row["block_sparsity"], row[field] / cells[commit, kind, "flash"][field])
                for (commit, kind, name), row in cells.items()
                if name == "entmax 1.5" and kind != "nape" and (commit, kind, "flash") in cells
            ]
            axis.plot(*zip(*points, strict=True), "os"[number], color=f"C{number}", label=f"{length >> 10}K tokens")
        axis.plot(
            [0, 100],
            [(always + live) / softmax, always / softmax],
            "--",
            color="0.5",
            label="products, ours over softmax's",
        )
        axis.axhline(1, color="0.7", linewidth=0.8)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("dead tiles (%)")
        axis.set_ylim(0)
    axes[0].set_ylabel("time over flash-2's")
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
