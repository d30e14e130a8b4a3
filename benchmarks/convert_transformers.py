"""A pretrained softmax model of transformers turned into an ASEntmax one: its loss before, during and after.

A Llama of 0.4 M parameters is trained on the source of Python's own library, byte by byte, at 128 bytes. Copies of it
are then trained on for a third as long: as it is, and converted by `longspan.integrations.transformers.convert`, with
its rotations and with NAPE, alpha raised from 1 to 1.5 over the first half; and under NAPE with softmax, to tell the
two apart. At the end each is asked for the same bytes after ever more context. About a quarter of an hour on one core;
rows go to a file, and the figure is drawn from them.

    python benchmarks/convert_transformers.py --figure docs/transformers/convert.png
"""

import argparse
import copy
import math
import sysconfig
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from longspan.integrations.transformers import annealed, convert, set_alpha
from longspan.plots import PALETTE, Panel, draw
from longspan.results import append_rows, provenance, read_rows

CONTEXT = 128
BATCH = 16
SCORED = 64  # tokens at the end of a window, the same ones at every length
ARMS = ("softmax, RoPE", "ASEntmax, RoPE kept", "ASEntmax, NAPE", "softmax, NAPE")


def texts() -> tuple[Tensor, Tensor]:
    """The bytes of the modules of Python's library, and of every tenth, which is held out."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return _bytes([path for number, path in enumerate(modules) if number % 10]), _bytes(modules[::10])


def _bytes(paths: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n\n\n".join(path.read_bytes() for path in paths)), dtype=torch.uint8)


def windows(data: Tensor, starts: Tensor, length: int) -> Tensor:
    return data[starts[:, None] + torch.arange(length)].long()


def train(
    model: PreTrainedModel,
    data: Tensor,
    steps: int,
    rate: float,
    before: Callable[[float], None],
    report: Callable[[int], None],
) -> None:
    """AdamW with a warm-up over a tenth and a cosine to a tenth; `before` is told how far training is."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    draw_starts = torch.Generator().manual_seed(steps)
    for step in range(steps):
        if step % 50 == 0:
            report(step)
        before(step / steps)
        for group in optimizer.param_groups:
            cosine = 0.55 + 0.45 * math.cos(math.pi * step / steps)
            group["lr"] = rate * min(1.0, 10 * (step + 1) / steps) * cosine
        ids = windows(data, torch.randint(len(data) - CONTEXT, (BATCH,), generator=draw_starts), CONTEXT)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    report(steps)


@torch.no_grad()
def loss_at(model: PreTrainedModel, data: Tensor, length: int, longest: int, count: int) -> float:
    """Nats a byte over the last `SCORED` bytes of windows that end at the same places whatever their length."""
    ends = torch.linspace(longest, len(data) - 1, count).long()
    total = 0.0
    for part in ends.split(max(1, 4096 // length)):
        ids = windows(data, part - length, length + 1)
        kept = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=SCORED).logits
        total += torch.nn.functional.cross_entropy(
            kept.flatten(0, 1), ids[:, -SCORED:].flatten(), reduction="sum"
        ).item()
    return total / (count * SCORED)


def pretrained(data: Tensor, report: Callable[[PreTrainedModel, int], None], steps: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    train(model, data, steps, 2e-3, lambda progress: None, lambda step: report(model, step))
    return model


def of_arm(name: str, model: PreTrainedModel) -> tuple[PreTrainedModel, Callable[[float], None]]:
    """A copy of the pretrained model as an arm has it, and what happens before every step of it."""
    model = copy.deepcopy(model)
    if name == ARMS[0]:
        return model, lambda progress: None
    softmax = name.startswith("softmax")
    convert(model, "softmax" if softmax else "asentmax", "nape" if "NAPE" in name else "keep")
    return model, lambda progress: set_alpha(model, 1.0 if softmax else annealed(progress))


def measure(out: Path, arms: Sequence[str], steps: int, longest: int, count: int) -> None:
    training, held_out = texts()
    facts = provenance("cpu")
    started = time.monotonic()

    def row(arm: str, event: str, model: PreTrainedModel, **values: Any) -> None:
        alpha = getattr(model.config, "longspan_alpha", 1.0)
        seconds = round(time.monotonic() - started, 1)
        append_rows(out, [{"arm": arm, "event": event, "alpha": alpha, **values, "seconds": seconds, **facts}])
        print(arm, event, values, f"alpha {alpha:.3f}", flush=True)

    def validate(arm: str, model: PreTrainedModel, step: int) -> None:
        row(arm, "validate", model, step=step, loss=loss_at(model, held_out, CONTEXT, longest, count))

    original = pretrained(training, lambda model, step: validate("pretraining", model, step), steps)
    for arm in arms:
        model, before = of_arm(arm, original)
        train(model, training, steps // 3, 1e-3, before, partial(validate, arm, model))
        for power in range(int(math.log2(longest // CONTEXT)) + 1):
            length = CONTEXT << power
            row(arm, "length", model, length=length, loss=loss_at(model, held_out, length, longest, count))


def figure(rows: Path, path: Path) -> None:
    found = list(read_rows(rows))
    during = {arm: {r["step"]: r["loss"] for r in found if (r["arm"], r["event"]) == (arm, "validate")} for arm in ARMS}
    after = {arm: {r["length"]: r["loss"] for r in found if (r["arm"], r["event"]) == (arm, "length")} for arm in ARMS}
    colours = dict(zip(ARMS, PALETTE, strict=False))
    panels = [
        Panel("Fine-tuning", "nats a byte", during, x_label="step", x_scale="linear", colours=colours, marker=""),
        Panel("Afterwards", "nats a byte", after, trained_to=CONTEXT, x_label="bytes of context", colours=colours),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(panels, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--count", type=int, default=64, help="windows of a measurement")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/convert_transformers.jsonl"))
    parser.add_argument("--figure", type=Path, help="draw it here")
    parser.add_argument("--redraw", action="store_true", help="from the rows that there are")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if not given.redraw:
        measure(given.out, given.arms, given.steps, given.longest, given.count)
    if given.figure:
        figure(given.out, given.figure)


if __name__ == "__main__":
    main()
