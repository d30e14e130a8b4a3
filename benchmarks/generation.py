"""Whether a model answers token by token, over a cache, what it answers in one teacher-forced forward; and how fast.

A row is the same if both give the same tokens up to and including the first that is wrong: after it they read different
texts. Rows that are right must be right either way. Times are medians.

    python benchmarks/generation.py RUN --lengths 4096 65536 --samples 8
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from longspan.nn.generate import generate
from longspan.results import append_rows, provenance
from longspan.tasks import get_task
from longspan.tasks.base import counted_tail, stream_seed
from longspan.train.checkpoint import load, of_run
from longspan.train.trainer import model_of


def same_until_wrong(forced: Tensor, greedy: Tensor, targets: Tensor) -> Tensor:
    """For each row of three (batch, time), whether the first two agree as far as both have read the same."""
    wrong = (forced != targets).long()
    read_alike = wrong.cumsum(1) - wrong == 0  # up to and including the first wrong token
    return ((forced == greedy) | ~read_alike).all(1)


def timed(call: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    wait()
    begun = time.perf_counter()
    result = call()
    wait()
    return result, time.perf_counter() - begun


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--samples", type=int, default=8, help="Sequences of each length, one after the other.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/generation.jsonl"))
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    model, config = model_of(load(of_run(arguments.run)), device)
    task = get_task(config.task, **config.task_options)
    origin = provenance()
    heads = ("length", "samples", "right", "greedy", "same", "forced s", "prefill s")
    print(*(f"{head:>9}" for head in heads), " ms a token")
    for length in arguments.lengths:
        generator = torch.Generator().manual_seed(stream_seed("test", 1, length))
        right = greedy = same = 0
        seconds: list[tuple[float, float, float]] = []
        for number in range(-1, arguments.samples):  # the first only warms up
            tokens, targets, mask = (part.to(device) for part in task.sample(1, length, generator=generator))
            last = counted_tail(mask)
            prompt, answer = tokens[:, : tokens.shape[1] - last + 1], targets[:, -last:]
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits, forced_time = timed(partial(model, tokens, last=last), device)
                _, prefill_time = timed(partial(generate, model, prompt, 1), device)
                text, all_time = timed(partial(generate, model, prompt, last), device)
            if number < 0:
                continue
            forced, generated = logits.argmax(-1), text[:, -last:]
            right += int((forced == answer).all())
            greedy += int((generated == answer).all())
            same += int(same_until_wrong(forced, generated, answer).all())
            seconds.append((forced_time, prefill_time, (all_time - prefill_time) / max(last - 1, 1)))
        forced_s, prefill_s, token_s = (statistics.median(times) for times in zip(*seconds, strict=True))
        row = {"task": config.task, "recipe": config.name, "seed": config.seed, "length": length}
        row |= {"samples": arguments.samples, "right": right, "right_greedy": greedy, "same": same}
        row |= {"forced_seconds": forced_s, "prefill_seconds": prefill_s, "seconds_a_token": token_s}
        append_rows(arguments.out, [row | origin])
        print(
            f"{length:9} {arguments.samples:9} {right:9} {greedy:9} {same:9} {forced_s:9.3f} {prefill_s:9.3f} "
            f"{1e3 * token_s:11.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
