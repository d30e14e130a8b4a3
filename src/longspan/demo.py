"""The paper's story on a laptop: train on at most 16 items, look at 4096.

Six ways to normalise attention learn Max Retrieval with the same model, data, optimiser and number of steps, several
at a time in processes of one thread each. Rows are written as they are measured. The other rows of the paper's table,
and the training of the original, are for those who have hours.
"""

import math
import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from longspan.evaluate.ladder import VALIDATION_MULTIPLES
from longspan.nn import Adaptive, AdaptiveTemperature, Entmax, Normalizer, NoScale, Scaler, Softmax, SSMax, TopK
from longspan.nn.retriever import Retriever
from longspan.paper.max_retrieval import ACCURACY as PAPER
from longspan.paper.max_retrieval import DEMO_ROWS, LENGTHS, paper_row
from longspan.plots import Panel, draw
from longspan.results import Row
from longspan.tasks.base import stream_seed
from longspan.tasks.max_retrieval import MaxRetrieval

TASK = MaxRetrieval()
WIDTH = 128


@dataclass(frozen=True)
class Contestant:
    """A method of the demo.

    `at_inference` are normalisers that take the place of the trained one, nothing retrained, each a row of its own.
    """

    name: str
    normalizer: Callable[[], Normalizer]
    scaler: Callable[[], Scaler] = NoScale
    at_inference: tuple[tuple[str, Callable[[], Normalizer]], ...] = ()

    @property
    def measured_as(self) -> tuple[str, ...]:
        """What its rows call it."""
        return self.name, *(name for name, _ in self.at_inference)


Training = Literal["demo", "paper"]


def contestants(training: Training = "demo") -> tuple[Contestant, ...]:
    """The demo's five, then every other row of the paper's table that is trained, by its name there."""
    adaptive = partial(Adaptive, WIDTH, 1, initial_beta=None)  # delta = 1, and a start like any layer's, as released
    if training == "demo":
        # delta = 0, as in SSMax: with delta = 1 the few lengths of the training teach beta to vanish beside it.
        adaptive = partial(Adaptive, WIDTH, 1, delta=0.0)
    return (
        Contestant("softmax", Softmax, at_inference=(("adaptive temperature", AdaptiveTemperature),)),
        Contestant("asentmax", Entmax, partial(adaptive, gamma=3.0)),
        Contestant("ssmax", Softmax, partial(SSMax, WIDTH, 1)),
        Contestant("entmax 1.5", Entmax),
        Contestant("top-2", partial(TopK, k=2)),
        # The paper's temperatures divide q . k itself; scores here are divided by the root of the width already.
        Contestant("softmax, temperature 0.1", partial(Softmax, 0.1 / math.sqrt(WIDTH))),
        Contestant("softmax, temperature 0.0004", partial(Softmax, 0.0004 / math.sqrt(WIDTH))),
        Contestant("top-4", partial(TopK, k=4)),
        *(Contestant(f"entmax {alpha}", partial(Entmax, float(alpha))) for alpha in (2, 4, 16, 32, 64)),
        *(Contestant(f"asentmax, gamma {gamma}", Entmax, partial(adaptive, gamma=float(gamma))) for gamma in (1, 2, 4)),
    )


CONTESTANTS = contestants()[:5]


@dataclass(frozen=True)
class DemoConfig:
    """The original's (5 to 16 items, batch 128, width 128) with 5,000 steps instead of 100,000.

    A higher learning rate with a cosine decay makes up for it, the same for every method. `PAPER_TRAINING` has the
    original's steps and its constant rate.
    """

    training: Training = "demo"
    steps: int = 5000
    batch: int = 128
    shortest: int = 5
    longest: int = 16
    learning_rate: float = 2e-3
    weight_decay: float = 1e-3
    warmup: int = 100
    samples: int = 1000
    lengths: tuple[int, ...] = LENGTHS
    seed: int = 0

    @property
    def validation_lengths(self) -> tuple[int, ...]:
        return tuple(multiple * self.longest for multiple in VALIDATION_MULTIPLES)

    @property
    def validation_samples(self) -> int:
        """More than are tested with: rates may be tenths of a point apart, and samples so short cost little."""
        return 4 * self.samples


PAPER_TRAINING = DemoConfig(training="paper", steps=100_000, learning_rate=1e-3)


class Progress(NamedTuple):
    """A contestant's state: steps done (or lengths measured) of how many, and a word on it."""

    name: str
    stage: str
    done: int
    total: int
    note: str


Event = Progress | Row
Report = Callable[[Event], None]


def train(model: Retriever, config: DemoConfig) -> Iterator[tuple[int, float]]:
    """Train `model` in place, yielding the number of steps done and the loss."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, config))
    generator = torch.Generator().manual_seed(config.seed)
    for step in range(1, config.steps + 1):
        length = int(torch.randint(config.shortest, config.longest + 1, (), generator=generator))
        batch = TASK.sample(config.batch, length, generator=generator)
        loss = nn.functional.cross_entropy(model(batch.items, batch.query).logits, batch.target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        yield step, loss.item()


def _rate(step: int, config: DemoConfig) -> float:
    if config.training == "paper":
        return 1.0
    warmup = min(1.0, (step + 1) / config.warmup)
    return warmup * 0.5 * (1 + math.cos(math.pi * step / config.steps))


def evaluate(model: Retriever, length: int, config: DemoConfig) -> Row:
    """The test at one length, on samples that training never drew."""
    accuracy, weight = _measured(model, length, config.samples, config.seed + 1_000_003 * length)
    return {"length": length, "accuracy": accuracy, "weight_on_maximum": weight, "samples": config.samples}


def validate(model: Retriever, config: DemoConfig) -> Row:
    """What a learning rate is chosen by: accuracy by length, on samples of which neither training nor the test has any.

    Lengths are words, as in JSON, so that a row is the same when it is read again.
    """
    samples, accuracy = config.validation_samples, {}
    for length in config.validation_lengths:
        accuracy[str(length)], _ = _measured(model, length, samples, stream_seed("validation", config.seed, length))
    return {"validation_accuracy": accuracy, "validation_samples": samples}


@torch.no_grad()
def _measured(model: Retriever, length: int, samples: int, seed: int) -> tuple[float, float]:
    """Accuracy in percent and the mean weight on the true maximum, on samples that the seed draws."""
    generator = torch.Generator().manual_seed(seed)
    right, weight = 0, 0.0
    at_once = max(1, min(samples, (1 << 16) // length))  # part of the test: other draws would be other samples
    for start in range(0, samples, at_once):
        batch = TASK.sample(min(at_once, samples - start), length, generator=generator)
        # In pieces whose activations fit in the cache and are not new memory each time: half of the time.
        piece = max(1, (1 << 14) // length)
        for items, query, target, best in zip(*(part.split(piece) for part in batch), strict=True):
            logits, weights = model(items, query)
            right += int((logits.argmax(-1) == target).sum())
            weight += float(weights.gather(1, best[:, None]).sum())
    return 100 * right / samples, weight / samples


def compete(contestant: Contestant, config: DemoConfig, report: Report) -> None:
    """Train one contestant and measure it, reporting progress and rows."""
    torch.manual_seed(config.seed)
    model = Retriever(TASK.num_classes, WIDTH, contestant.normalizer(), contestant.scaler())
    started = time.monotonic()
    for step, loss in train(model, config):
        if step % 50 == 0 or step == config.steps:
            report(Progress(contestant.name, "train", step, config.steps, f"loss {loss:.4f}"))
    origin: Row = {"task": "max_retrieval", "seed": config.seed, "training": config.training, "steps": config.steps}
    origin |= {"learning_rate": config.learning_rate, "seconds": round(time.monotonic() - started, 1)}
    stages = [(contestant.name, model.normalizer), *((name, make()) for name, make in contestant.at_inference)]
    validation: dict[str, Row] = {}
    for name, model.normalizer in stages:
        validation[name] = validate(model, config)
    lengths = [(name, normalizer, length) for length in config.lengths for name, normalizer in stages]
    for done, (name, model.normalizer, length) in enumerate(lengths, start=1):
        row = evaluate(model, length, config)
        report(origin | {"method": name} | row | validation[name])
        note = f"{row['accuracy']:.1f} % at {length}"
        report(Progress(contestant.name, "measure", done, len(lengths), note))


def run(config: DemoConfig, names: Sequence[str]) -> Iterator[Event]:
    """Run the contestants of these names, as many at a time as there are cores, and yield what they report.

    Leaving the iterator early, by Ctrl-C for instance, ends the processes.
    """
    context = multiprocessing.get_context("spawn")
    events: Any = context.Queue()
    with context.Pool(max(1, min(os.cpu_count() or 1, len(names))), _start_worker, (events,)) as pool:
        results = [pool.apply_async(_compete_by_name, (name, config)) for name in names]
        while True:
            finished = all(result.ready() for result in results)
            try:
                yield events.get(timeout=0.2)
            except queue.Empty:
                if finished:
                    break
            for result in results:
                if result.ready():
                    result.get()  # raises what the worker raised


_events: Any = None


def _start_worker(events: Any) -> None:
    global _events
    _events = events
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    torch.set_num_threads(1)


def _compete_by_name(name: str, config: DemoConfig) -> None:
    contestant = next(contestant for contestant in contestants(config.training) if contestant.name == name)
    compete(contestant, config, _events.put)


def curves(rows: Iterable[Row], key: str) -> dict[str, dict[int, float]]:
    """`key` by method and length, in the order of `DEMO_ROWS`, then as they come."""
    found: dict[str, dict[int, float]] = {name: {} for name in DEMO_ROWS}
    for row in rows:
        found.setdefault(row["method"], {})[row["length"]] = row[key]
    return {name: dict(sorted(curve.items())) for name, curve in found.items() if curve}


def draw_figures(rows: list[Row], config: DemoConfig, folder: Path) -> list[Path]:
    """`accuracy.png` and `attention.png`, from whatever rows there are."""
    accuracy, attention = folder / "accuracy.png", folder / "attention.png"
    measured = curves(rows, "accuracy")
    draw(
        [
            Panel(
                title=f"Max Retrieval: trained on at most {config.longest} items",
                y_label="accuracy (%)",
                curves=measured,
                dotted={name: PAPER[paper_row(name)] for name in measured},
                dotted_label="the paper",
                trained_to=config.longest,
                y_limits=(0, 103),
            )
        ],
        accuracy,
    )
    draw(
        [
            Panel(
                title="How much of the attention the maximum keeps",
                y_label="mean weight on the maximum",
                curves=curves(rows, "weight_on_maximum"),
                trained_to=config.longest,
                y_limits=(0, 1.03),
            )
        ],
        attention,
    )
    return [accuracy, attention]
