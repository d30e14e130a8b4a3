"""Microseconds of a decoding step on a GPU: exact entmax over a cache against softmax's flash decoding.

One new token, bf16, 32 query heads over 8 key heads of 128. Workloads, keys in blocks of 128 tokens:

    random   Gaussian q and k
    topics4  every block has one of 4 topics, every query head wants one: its scores there are 10 higher
    topics16 the same with 16 topics
    nape     topics16, half of the query heads with ALiBi slopes 1/h
    alike    topics16, and apart from its topic a key is smaller: boxes around pages exclude some (with --boxes)

A step of attention reads far more than it computes, so beside the time there is the traffic: bytes of K, V and of what
the kernels write for themselves, and the floor, which is every key once (in reach of a slope) and the values of
survivors. Calls run from a CUDA graph, over as many copies of the cache as exceed the L2 cache several times, and
implementations take turns. `sdpa` is the best of torch's backends, with the heads of a group as heads or as queries.

    python benchmarks/decode.py --lengths 8192 131072 --batches 1 --seconds 120
    python benchmarks/decode.py --lengths 8192 --batches 1 --kinds random --profile --tune score row
    TRITON_INTERPRET=1 python benchmarks/decode.py --device cpu --lengths 200 --dim 16    # whether it runs
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from longspan import decode
from longspan.functional import PageSummary
from longspan.functional.decode import extended_summary
from longspan.results import Row, append_rows, provenance

BLOCK = 128
KINDS = ("random", "topics4", "topics16", "nape", "alike")
AT_ONCE = 1 << 16  # keys that the dense helpers hold in float32
LEAST_STEPS = 24  # of one CUDA graph
TUNABLE = ("early", "score", "run", "row", "shares", "held", "gather", "short", "value")
Attend = Callable[["Cache"], Tensor]


class Cache(NamedTuple):
    """A decoding step's inputs."""

    q: Tensor  # (batch, heads, 1, dim)
    k: Tensor  # (batch, kv_heads, length, dim)
    v: Tensor
    summary: PageSummary


class Sizes(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    device: torch.device
    dtype: torch.dtype


def workload(kind: str, batch: int, length: int, sizes: Sizes, seed: int) -> Cache:
    """Built a sequence at a time, in place, so that a million tokens times 8 fit."""
    generator = torch.Generator(sizes.device).manual_seed(seed)
    options: dict[str, Any] = {"device": sizes.device, "dtype": sizes.dtype, "generator": generator}
    shape = batch, sizes.kv_heads, length, sizes.dim
    q = torch.randn(batch, sizes.heads, 1, sizes.dim, **options)
    k, v = torch.randn(shape, **options), torch.randn(shape, **options)
    if kind == "alike":
        k *= 0.2
    if kind != "random":
        count = 4 if kind == "topics4" else 16
        random = torch.randn(sizes.dim, sizes.dim, device=sizes.device, generator=generator)
        directions = torch.linalg.qr(random)[0][:count] * (10 * math.sqrt(sizes.dim)) ** 0.5
        draw = partial(torch.randint, count, device=sizes.device, generator=generator)
        q += directions[draw(size=q.shape[:3])].to(q.dtype)
        for item in k:
            for head in item:
                topic = draw(size=(math.ceil(length / BLOCK),)).repeat_interleave(BLOCK)[:length]
                head += directions.to(k.dtype)[topic]
    return Cache(q, k, v, summary_of(k))


def summary_of(k: Tensor) -> PageSummary:
    """By heads and pieces, as the norms of a million keys times 64 heads would not fit."""
    parts = [
        [extended_summary(None, part[None, None], 0, len(part), boxes=True) for part in head.split(AT_ONCE)]
        for item in k
        for head in item
    ]

    def joined(name: str) -> Tensor:
        heads = [torch.cat([getattr(part, name)[0, 0] for part in head]) for head in parts]
        return torch.stack(heads).unflatten(0, k.shape[:2])

    return PageSummary(joined("norms"), joined("low"), joined("high"))


def slopes_of(kind: str, sizes: Sizes) -> Tensor | None:
    if kind != "nape":
        return None
    local = sizes.heads // 2
    return torch.cat([1 / torch.arange(1, local + 1), torch.zeros(sizes.heads - local)]).to(sizes.device)


def known(cache: Cache, slopes: Tensor | None, boxes: bool) -> PageSummary | None:
    """What a step is told of the pages: norms are of no use without slopes."""
    if boxes:
        return cache.summary
    return None if slopes is None else PageSummary(cache.summary.norms)


def ours(slopes: Tensor | None, alpha: float, boxes: bool) -> Attend:
    return lambda cache: decode(
        cache.q, cache.k, cache.v, alpha=alpha, slopes=slopes, summary=known(cache, slopes, boxes), impl="triton"
    )


def sdpa(backend: SDPBackend, folded: bool) -> Attend:
    """Softmax, without slopes; `folded`: the heads that share keys as queries of one head, which no mask hides."""

    def attend(cache: Cache) -> Tensor:
        q, k, v = cache.q, cache.k, cache.v
        with sdpa_kernel(backend):
            if folded:
                out = scaled_dot_product_attention(q.view(q.shape[0], k.shape[1], -1, q.shape[3]), k, v)
                return out.view(q.shape)
            return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return attend


def flash_attn() -> Attend:
    from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found]

    return lambda cache: flash_attn_with_kvcache(*(tensor.transpose(1, 2) for tensor in cache[:3])).transpose(1, 2)


def flashinfer() -> Attend:
    from flashinfer import single_decode_with_kv_cache  # type: ignore[import-not-found]

    def attend(cache: Cache) -> Tensor:
        assert len(cache.q) == 1
        return single_decode_with_kv_cache(cache.q[0, :, 0], cache.k[0], cache.v[0], kv_layout="HND")[None, :, None]

    return attend


def peers(wanted: list[str], device: torch.device) -> dict[str, Attend]:
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    if device.type == "cpu":
        backends = {"flash": SDPBackend.MATH}
    found: dict[str, Attend] = {}
    for name in wanted:
        if name in backends:
            found[f"sdpa {name}"] = sdpa(backends[name], False)
            found[f"sdpa {name} folded"] = sdpa(backends[name], True)
    for name, importer in (("flash_attn", flash_attn), ("flashinfer", flashinfer)):
        if name in wanted:
            try:
                found[name] = importer()
            except ImportError as error:
                print(f"{name} is left out: {error}")
    return found


def runner(attend: Attend, caches: list[Cache], rounds_of_copies: int) -> Callable[[], float]:
    """A function that runs the step over every copy and says the microseconds of one; raises if the step fails."""
    for cache in caches[:2]:
        attend(cache)
    steps = len(caches) * rounds_of_copies
    if caches[0].q.device.type == "cpu":

        def by_clock() -> float:
            begun = time.perf_counter()
            for cache in caches:
                attend(cache)
            return (time.perf_counter() - begun) * 1e6 / len(caches)

        return by_clock
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds_of_copies):
            for cache in caches:
                attend(cache)
    graph.replay()

    def by_events() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / steps

    return by_events


def measure(attend: dict[str, Attend], caches: list[Cache], rounds: int) -> dict[str, float]:
    """The median microseconds of a step; those that fail are left out."""
    step_bytes = sum(tensor.nbytes for tensor in caches[0][1:3])
    # A few milliseconds a replay, and enough steps for its own launch, tens of microseconds, to be lost among them.
    repeats = max(math.ceil(LEAST_STEPS / len(caches)), min(20, int(4e9 / step_bytes / len(caches))))
    runners: dict[str, Callable[[], float]] = {}
    for name, function in attend.items():
        try:
            runners[name] = runner(function, caches, repeats)
        except Exception as error:  # a peer that cannot run this cell leaves the others alone
            print(f"  {name}: {(str(error).splitlines() or [type(error).__name__])[0][:150]}")
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, run in runners.items():
            times[name].append(run())
    return {name: statistics.median(values) for name, values in times.items()}


def traffic(cache: Cache, slopes: Tensor | None, alpha: float, boxes: bool) -> Row:
    """Bytes that a step of ours reads and writes, from what it did, all scores counted as stored; and its survivors."""
    from longspan.kernels.decode_ops import Decoded, decode_attention

    summary = known(cache, slopes, boxes) or (None, None, None)
    scale = cache.q.shape[3] ** -0.5
    made = Decoded(*decode_attention(cache.q, cache.k, cache.v, slopes, *[None] * 4, *summary, alpha, scale, True))
    pages = int((made.tops > -torch.inf).any(4).any(2).sum())
    values = survivors(cache, made.maximum - made.height, slopes, alpha) if alpha > 1 else cache.k[..., 0].numel()
    width = cache.q.element_size() * cache.q.shape[3]
    rows = made.maximum.shape[2]
    return {
        "key_bytes": pages * 64 * width,
        "value_bytes": values * width,
        "scratch_bytes": pages * 64 * rows * 4,
        "summary_bytes": sum(part.nbytes for part in summary if part is not None),
        "support": float(made.support.mean()),
        "pages_unread": 1 - pages / made.tops[:, :, 0, :, 0].numel(),
    }


def dense_traffic(cache: Cache) -> Row:
    return {"key_bytes": cache.k.nbytes, "value_bytes": cache.v.nbytes}


def survivors(cache: Cache, tau: Tensor, slopes: Tensor | None, alpha: float) -> int:
    """Keys that at least one query head of their group keeps, over all key heads."""
    count, (batch, kv_heads, length, dim) = 0, cache.k.shape
    group = cache.q.shape[1] // kv_heads
    for item, head in itertools.product(range(batch), range(kv_heads)):
        own = slice(head * group, (head + 1) * group)
        q = cache.q[item, own, 0].float() * (dim**-0.5 * (alpha - 1))
        for begin in range(0, length, AT_ONCE):
            z = q @ cache.k[item, head, begin : begin + AT_ONCE].float().mT
            if slopes is not None:
                distance = length - 1 - torch.arange(begin, begin + z.shape[1], device=z.device)
                z -= (alpha - 1) * slopes[own, None] * distance
            count += int((z > tau[item, head][:, None]).any(0).sum())
    return count


def error_of(cache: Cache, slopes: Tensor | None, alpha: float, boxes: bool) -> float:
    """The largest difference from the dense float32 computation, in the first sequence and the first key head."""
    group = cache.q.shape[1] // cache.k.shape[1]
    first = [tensor[:1, :heads].float() for tensor, heads in zip(cache[:3], (group, 1, 1), strict=True)]
    own = None if slopes is None else slopes[:group]
    exact = decode(first[0], first[1], first[2], alpha=alpha, slopes=own, impl="reference")
    return float((ours(slopes, alpha, boxes)(cache)[:1, :group].float() - exact).abs().max())


def profile(attend: Attend, caches: list[Cache]) -> dict[str, float]:
    """Microseconds of every kernel of a step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    with recorded(activities=[ProfilerActivity.CUDA]) as record:
        for cache in caches * max(1, 10 // len(caches)):
            attend(cache)
        torch.cuda.synchronize()
    return {event.key: event.self_device_time_total / event.count for event in record.key_averages()}


def settings_to_try() -> dict[str, tuple[str, list[Any]]]:
    """By the name of a choice: what it is called in `decode_ops`, and what it may be."""
    from longspan.kernels.decode_ops import Launch

    scores = [(4, 4, 3), (4, 4, 4), (4, 8, 3), (8, 4, 3), (8, 4, 2), (2, 4, 5), (2, 8, 4), (3, 4, 4)]
    scores += [(4, 2, 3), (4, 1, 3), (3, 2, 4), (2, 2, 5), (8, 2, 2), (8, 1, 2), (4, 4, 5), (5, 4, 3), (6, 4, 3)]
    rows = [(1, 8, 1), (1, 4, 1), (1, 16, 1), (2, 8, 1), (2, 4, 1), (4, 8, 1)]
    return {
        "score": ("SCORE", [Launch(*launch) for launch in scores]),
        "early": ("EARLY", [False, True]),
        "run": ("LONGEST_RUN", [8, 16, 32, 64, 128]),
        "row": ("ROW", [Launch(*launch) for launch in rows]),
        "shares": ("MOST_SHARES", [1, 2, 4, 8]),
        "held": ("PAGES_HELD", [8, 16, 32, 64]),
        "gather": ("GATHERED", [1 << 12, 1 << 13, 1 << 14]),
        "short": ("SHORT", [0, 1 << 20]),
        "value": ("VALUE", [Launch(*launch) for launch in [(4, 4, 2), (4, 4, 3), (8, 4, 2), (2, 8, 3)]]),
    }


def tuned(attend: Attend, caches: list[Cache], rounds: int, choices: list[str]) -> Iterator[Row]:
    """Times under other settings, one choice after the other, each with the best of those before it."""
    from longspan.kernels import decode_ops

    before = {name: getattr(decode_ops, name) for name, _ in settings_to_try().values()}
    try:
        for choice in choices:
            name, values = settings_to_try()[choice]
            times: list[tuple[float, int]] = []
            for index, value in enumerate(values):
                setattr(decode_ops, name, value)
                times.append((measure({"ours": attend}, caches, rounds).get("ours", math.inf), index))
                yield {"setting": name, "value": str(tuple(value) if isinstance(value, tuple) else value),
                       "microseconds": times[-1][0]}  # fmt: skip
            setattr(decode_ops, name, values[min(times)[1]])
    finally:
        for name, value in before.items():
            setattr(decode_ops, name, value)


def ways(alphas: list[float], boxes: bool) -> dict[str, tuple[float, bool]]:
    """Alpha, and whether boxes are known, by name."""
    both = itertools.product(alphas, (False, True) if boxes else (False,))
    return {f"entmax {alpha:g}" + " boxes" * known_boxes: (alpha, known_boxes) for alpha, known_boxes in both}


def copies_for(length: int, batch: int, sizes: Sizes, kind: str) -> list[Cache]:
    """Caches that together exceed the L2 cache several times."""
    width = 2 * torch.finfo(sizes.dtype).bits // 8
    one = batch * sizes.kv_heads * length * sizes.dim * width
    count = 1 if sizes.device.type == "cpu" else max(1, min(16, math.ceil(4e8 / one)))
    return [workload(kind, batch, length, sizes, seed) for seed in range(count)]


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1 << 13, 1 << 15, 1 << 17, 1 << 20])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS[:4]), choices=KINDS)
    parser.add_argument("--alphas", nargs="+", type=float, default=[1.5])
    parser.add_argument("--heads", nargs=2, type=int, default=[32, 8], help="Query heads and key heads.")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--peers", nargs="*", default=["flash", "cudnn", "flash_attn", "flashinfer"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=math.inf, help="Start no new case after so long.")
    parser.add_argument("--boxes", action="store_true", help="Also with boxes around the pages.")
    parser.add_argument("--profile", action="store_true", help="Also the time of every kernel.")
    parser.add_argument(
        "--tune", nargs="*", metavar="CHOICE", choices=TUNABLE,
        help=f"Also the times under other settings; of all of these, or of some, in order: {', '.join(TUNABLE)}.",
    )  # fmt: skip
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/decode.jsonl"))
    return parser.parse_args()


def main() -> None:
    arguments = arguments_of()
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    sizes = Sizes(arguments.heads[0], arguments.heads[1], arguments.dim, torch.device(arguments.device), dtype)
    origin, begun = provenance(arguments.device), time.monotonic()
    others = peers(arguments.peers, sizes.device)
    print(f"batch   length kind {'':25} {'us':>9} {'x best sdpa':>11} {'TB/s':>6} {'K MiB':>8} {'V MiB':>8}")
    for length, batch, kind in itertools.product(arguments.lengths, arguments.batches, arguments.kinds):
        if time.monotonic() - begun > arguments.seconds:
            print("out of time: the rest is left out")
            return
        caches, slopes = copies_for(length, batch, sizes, kind), slopes_of(kind, sizes)
        named = ways(arguments.alphas, arguments.boxes)
        attend = {name: ours(slopes, *way) for name, way in named.items()}
        times = measure(attend | others, caches, arguments.rounds)
        best = min((times[name] for name in times if name.startswith("sdpa")), default=math.nan)
        case: Row = {"batch": batch, "length": length, "kind": kind, **sizes_row(sizes)}
        for name, microseconds in times.items():
            row = case | {"name": name, "microseconds": microseconds, "times_best_sdpa": best / microseconds}
            row |= traffic(caches[0], slopes, *named[name]) if name in named else dense_traffic(caches[0])
            row["terabytes_per_second"] = sum(row[key] for key in row if key.endswith("_bytes")) / microseconds / 1e6
            if name in named and length <= 1 << 17:
                row["error"] = error_of(caches[0], slopes, *named[name])
            append_rows(arguments.out, [row | origin])
            print(
                f"{batch:5} {length:8} {kind:9} {name:20} {microseconds:9.1f} {best / microseconds:11.2f} "
                f"{row['terabytes_per_second']:6.2f} {row['key_bytes'] / 2**20:8.1f} {row['value_bytes'] / 2**20:8.1f}",
                flush=True,
            )
        main_one = next(iter(attend.values()))
        if arguments.profile and sizes.device.type == "cuda":
            kernels = profile(main_one, caches)
            append_rows(arguments.out, [case | {"name": "kernels", "kernel_microseconds": kernels} | origin])
            for kernel, microseconds in kernels.items():
                print(f"  {kernel[:60]:60} {microseconds:9.1f}")
        if arguments.tune is not None:
            for row in tuned(main_one, caches, 2, arguments.tune or list(TUNABLE)):
                if time.monotonic() - begun > arguments.seconds:
                    break
                append_rows(arguments.out, [case | {"name": "launch"} | row | origin])
                print("  " + " ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        del caches


def sizes_row(sizes: Sizes) -> Row:
    return {"heads": sizes.heads, "kv_heads": sizes.kv_heads, "dim": sizes.dim, "dtype": str(sizes.dtype)}


if __name__ == "__main__":
    main()
