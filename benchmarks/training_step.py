"""Milliseconds of a paper-size training step on a GPU: ours against a plain compiled step captured in a graph.

The plain step has the same model, optimiser and batch, every sequence padded to the longest training length, all
logits computed. Ours draws a length per batch, so its time is the mean over the lengths as they come. Both are timed
by wall clock over many steps of one process, alternating, sampling included for ours.

    python benchmarks/training_step.py --tasks mqmtar copy --methods softmax asentmax
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from longspan import entmax
from longspan.functional.attention import scaled_queries
from longspan.functional.scores import Rules
from longspan.nn import Attention
from longspan.nn.decoder import Decoder
from longspan.paper.recipes import recipe
from longspan.results import append_rows, provenance
from longspan.tasks import get_task
from longspan.train.config import RunConfig
from longspan.train.trainer import Trainer


def plain_attention(module: Attention, q: Tensor, k: Tensor, v: Tensor, rules: Rules, scales: Tensor | None) -> Tensor:
    """PyTorch's own attention for softmax; for entmax, products in the dtype of the inputs."""
    q = scaled_queries(q, scales)
    positions = torch.arange(q.shape[2], device=q.device)
    bias = torch.zeros(q.shape[1], 1, 1, device=q.device) if rules.slopes is None else -rules.slopes[:, None, None]
    bias = bias * (positions[:, None] - positions).abs()
    bias = bias.masked_fill(positions > positions[:, None], -torch.inf)  # (H, T, T)
    form = module.normalizer.entmax_form()
    assert form is not None
    assert form.temperature == 1
    if form.alpha == 1:
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype), scale=rules.scale)
    return entmax((q @ k.mT).float() * rules.scale + bias, form.alpha).to(v.dtype) @ v


def plain_step(config: RunConfig) -> Callable[[], None]:
    """A step as most would write it: `torch.compile`, fused AdamW, one CUDA graph at the longest length."""
    torch.manual_seed(0)
    model = Decoder(config.model).cuda()
    for module in model.modules():
        if isinstance(module, Attention):
            module._attend = partial(plain_attention, module)  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
    batch = get_task(config.task).sample(config.batch, config.longest, device="cuda")

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens)
        losses = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * mask.flatten()).sum() / mask.sum()

    compiled = torch.compile(loss_of, dynamic=False)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        compiled(*batch).backward()
        optimizer.step()

    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    alive = (model, optimizer, batch, compiled)  # a graph does not keep what it reads from

    def replay() -> None:
        assert alive
        graph.replay()

    return replay


def milliseconds(step: Callable[[], None], steps: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / steps


def sampling_milliseconds(trainer: Trainer, steps: int) -> float:
    """GPU time of the sampling alone: what it takes from the step when the host runs ahead."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # so that the launches queue up and only kernels are timed
    start.record()
    for step in range(steps):
        trainer.draw(step)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["mqmtar", "reverse", "copy", "sort", "2back"])
    parser.add_argument("--methods", nargs="+", default=["softmax", "asentmax"])
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon"])
    parser.add_argument("--plain", nargs="*", help="Methods to time the plain step of: it compiles for minutes. All.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/training_step.jsonl"))
    arguments = parser.parse_args()
    origin = provenance()
    print(f"{'task':10} {'method':10} {'optimizer':10} {'plain':>8} {'ours':>8} {'ratio':>6} {'sampling':>9}  set-up")
    for task in arguments.tasks:
        for method in arguments.methods:
            config = recipe(f"paper/{task}/nape/{method}")
            torch._dynamo.reset()
            plain = plain_step(config) if arguments.plain is None or method in arguments.plain else None
            for name in arguments.optimizers:
                begun = time.perf_counter()
                trainer = Trainer(replace(config, optimizer=replace(config.optimizer, name=name)), "cuda")
                for _ in range(400):  # every length is met and captured
                    trainer.advance()
                torch.cuda.synchronize()
                setup = time.perf_counter() - begun
                times: dict[str, list[float]] = {"plain": [], "ours": []}
                for _ in range(arguments.rounds):
                    if plain is not None:
                        times["plain"].append(milliseconds(plain, arguments.steps))
                    times["ours"].append(milliseconds(trainer.advance, arguments.steps))
                medians = {key: statistics.median(values or [math.nan]) for key, values in times.items()}
                sampling = sampling_milliseconds(trainer, 20)
                row = {"task": task, "method": method, "optimizer": name, **medians, "sampling": sampling}
                append_rows(arguments.out, [row | {"setup_seconds": setup, "steps": arguments.steps} | origin])
                ratio = medians["plain"] / medians["ours"]
                print(
                    f"{task:10} {method:10} {name:10} {medians['plain']:8.3f} {medians['ours']:8.3f} {ratio:6.2f} "
                    f"{sampling:9.3f}  {setup:.0f} s, loss {trainer.metrics().loss:.3f}",
                    flush=True,
                )
                del trainer


if __name__ == "__main__":
    main()
