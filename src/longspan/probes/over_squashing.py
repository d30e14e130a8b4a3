"""Proposition 2, second part: does a sparser attention let more gradient through?

Decoders of 8 layers that differ in alpha alone are trained on Delayed Copy, for each seed from the same weights on the
same batches. Measured at points of the training, for every layer: the norm of the loss's gradient with respect to the
layer's input, the norm of that input, and the attention paths, a path being an edge j -> k with a weight above zero in
some head or the residual's j = k.

Two things besides over-squashing move a gradient norm, and the paper holds neither still. It falls with the loss,
whose slope vanishes where the answer is known. And after RMS norms the size of the hidden states is arbitrary: states
c times as large, by larger embeddings and output norms, are the same function with gradients 1/c as large. So beside
the paper's number stands one that neither moves, d log loss / d log state = |gradient| |state| / loss.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.evaluate.inspect import heads_of, weights_of
from longspan.nn.decoder import AttentionConfig, Block, Decoder, DecoderConfig
from longspan.probes.base import Probe, Report, Size, method_name
from longspan.results import Row
from longspan.tasks import get_task
from longspan.tasks.base import Batch, stream_seed
from longspan.train.config import OptimizerConfig, Precision, RunConfig
from longspan.train.trainer import Trainer, model_of
from longspan.train.worker import compile_without_limit

ALPHAS = (1.0, 1.5, 2.0)
SEEDS = (0, 1, 2)
LAYERS = 8
LOOKS = 10  # measurements during the training, after the one before it
SEQUENCES = 32  # of a measurement


class Scale(NamedTuple):
    length: int
    symbols: int
    dim: int
    heads: int
    steps: int
    batch: int


SCALES: dict[Size, Scale] = {
    "small": Scale(length=32, symbols=8, dim=48, heads=4, steps=300, batch=16),
    "paper": Scale(length=256, symbols=32, dim=256, heads=8, steps=2000, batch=64),
}


def run_config(scale: Scale, alpha: float, seed: int, precision: Precision = "float32") -> RunConfig:
    """The run of one alpha. The paper does not say its position or optimiser: NAPE and Muon are ours."""
    options: dict[str, float] = {"num_symbols": scale.symbols}
    attention = AttentionConfig(method="entmax", position="nape", alpha=alpha)
    vocabulary = get_task("delayed_copy", **options).vocabulary
    return RunConfig(
        task="delayed_copy",
        task_options=options,
        model=DecoderConfig(vocabulary, LAYERS, scale.dim, 2 * scale.dim, scale.heads, attention),
        optimizer=OptimizerConfig("muon", learning_rate=3e-3, muon_learning_rate=0.02, warmup=50),
        steps=scale.steps,
        batch=scale.batch,
        shortest=scale.length,
        longest=scale.length,
        seed=seed,
        precision=precision,
    )


class Gradients(NamedTuple):
    """Of every layer's input, each (layers,): norms over a sequence, means over the batch; and the loss (batch,)."""

    norm: Tensor
    state_norm: Tensor
    loss: Tensor
    inputs: list[Tensor]


def gradients(model: Decoder, batch: Batch) -> Gradients:
    """The norm of d loss / d input of every layer, the loss being a sequence's own mean."""
    inputs: list[Tensor] = []
    hooks = [
        block.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0])) for block in model.blocks
    ]
    try:
        logits = model(batch.tokens)
    finally:
        for hook in hooks:
            hook.remove()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    loss = (losses.view_as(batch.mask) * batch.mask).sum(1) / batch.mask.sum(1)  # (B,)
    found = torch.autograd.grad(loss.sum(), inputs)
    norms, states = (torch.stack([part.flatten(1).norm(dim=1).mean() for part in parts]) for parts in (found, inputs))
    return Gradients(norms, states.detach(), loss.detach(), [x.detach() for x in inputs])


class Edges(NamedTuple):
    """Of one layer: mean support of a query in a head, and who reads whom (batch, time, time), residual included."""

    support: float
    graph: Tensor


@torch.no_grad()
def edges(model: Decoder, inputs: Sequence[Tensor]) -> list[Edges]:
    """The attention paths of every layer whose block reads `inputs`."""
    layers = []
    for block, x in zip(model.blocks, inputs, strict=True):
        assert isinstance(block, Block)
        rows = torch.arange(x.shape[1], device=x.device)
        active = (
            weights_of(block.attention, heads_of(block.attention, block.before_attention(x)), rows) > 0
        )  # (B, H, T, T)
        residual = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        layers.append(Edges(active.sum(-1).double().mean().item(), active.any(1) | residual))
    return layers


def paths_to_last(graphs: Sequence[Tensor]) -> Tensor:
    """For every layer and sequence, how many paths lead from that layer's input to the last token's output.

    From `graphs` (batch, time, time) of every layer to (layers, batch). Reading all of n tokens in L layers it is
    C(n + L - 1, L): of order n^L / L!, over all sources together.
    """
    reached = torch.zeros(graphs[0].shape[:2], dtype=torch.float64, device=graphs[0].device)
    reached[:, -1] = 1
    counts = []
    for graph in reversed(graphs):
        reached = torch.einsum("bj,bjk->bk", reached, graph.double())
        counts.append(reached.sum(1))
    return torch.stack(counts[::-1])


def look(model: Decoder, batch: Batch) -> list[Row]:
    """A row for every layer."""
    flow = gradients(model, batch)
    layers = edges(model, flow.inputs)
    paths = paths_to_last([layer.graph for layer in layers]).log10().mean(1)
    return [
        {
            "layer": number + 1,
            "loss": flow.loss.mean().item(),
            "gradient": flow.norm[number].item(),
            "state": flow.state_norm[number].item(),
            "support": layer.support,
            "log10_paths": paths[number].item(),
        }
        for number, layer in enumerate(layers)
    ]


def _measure(size: Size, report: Report) -> Iterator[Row]:
    scale = SCALES[size]
    device = "cuda" if size == "paper" and torch.cuda.is_available() else "cpu"
    precision: Precision = "bfloat16" if device == "cuda" else "float32"  # of the training
    task = get_task("delayed_copy", num_symbols=scale.symbols)
    generator = torch.Generator().manual_seed(stream_seed("test", scale.length))
    batch = Batch(*(part.to(device) for part in task.sample(SEQUENCES, scale.length, generator=generator)))
    cells = [(seed, alpha) for seed in SEEDS for alpha in ALPHAS]
    if device == "cuda":
        compile_without_limit()
    for number, (seed, alpha) in enumerate(cells):
        trainer = Trainer(run_config(scale, alpha, seed, precision), device)
        origin = {
            "seed": seed,
            "alpha": alpha,
            "n": batch.tokens.shape[1],
            "trained_on": device,
            "precision": precision,
        }
        for step in range(scale.steps + 1):
            if step % (scale.steps // LOOKS) == 0:
                report(number * scale.steps + step, len(cells) * scale.steps, f"seed {seed}, alpha {alpha:g}")
                model, _ = model_of(trainer.checkpoint(), device)  # a compiled one would not see the hooks
                # In float32 a twentieth of a trained softmax's weights are rounded to 0, which is no path.
                yield from (origin | {"step": step} | row for row in look(model.double(), batch))
            if step < scale.steps:
                trainer.advance()
    report(len(cells) * scale.steps, len(cells) * scale.steps, "")


def _mean(rows: Sequence[Row], alpha: float, step: int, layer: int, what: str) -> float:
    """The mean over seeds, of norms and losses the geometric one."""
    wanted = (alpha, step, layer)
    values = [row[what] for row in rows if (row["alpha"], row["step"], row["layer"]) == wanted]
    return geometric_mean(values) if what in ("gradient", "state", "loss") else fmean(values)


def _layers(rows: Sequence[Row], alpha: float, step: int, what: str) -> dict[int, float]:
    return {layer: _mean(rows, alpha, step, layer, what) for layer in range(1, LAYERS + 1)}


def _history(rows: Sequence[Row], alpha: float, layer: int) -> dict[float, float]:
    """The gradient's norm by the loss, in the order of the training."""
    steps = sorted({row["step"] for row in rows})
    return {_mean(rows, alpha, step, layer, "loss"): _mean(rows, alpha, step, layer, "gradient") for step in steps}


def at_loss(history: dict[float, float], loss: float) -> float:
    """The norm when the loss first came down to `loss`, by a straight line through the logarithms."""
    for (before, high), (after, low) in itertools.pairwise(history.items()):
        if after <= loss <= before:
            share = math.log(before / loss) / math.log(before / after)
            return high ** (1 - share) * low**share
    return [*history.values()][-1]


def _ratios(rows: Sequence[Row], alpha: float, step: int) -> dict[int, float]:
    """The gradient's norm over softmax's, by layer."""
    softmax = _layers(rows, 1.0, step, "gradient")
    return {layer: norm / softmax[layer] for layer, norm in _layers(rows, alpha, step, "gradient").items()}


def _draw(rows: Sequence[Row], path: Path) -> None:
    from longspan.plots import Panel, draw

    end, n = max(row["step"] for row in rows), rows[0]["n"]
    layers = range(1, LAYERS + 1)
    panels = [
        Panel(
            f"gradient after training, n = {n}",
            "norm of the gradient at the layer's input",
            {method_name(alpha): _layers(rows, alpha, end, "gradient") for alpha in ALPHAS},
            y_scale="log",
            x_label="layer",
            x_scale="linear",
            x_ticks=layers,
        ),
        Panel(
            "the same over softmax's",
            "ratio of the norms",
            {method_name(alpha): _ratios(rows, alpha, end) for alpha in ALPHAS},
            {method_name(alpha): _ratios(rows, alpha, 0) for alpha in ALPHAS[1:]},
            "before the first step, equal weights",
            y_scale="log",
            x_label="layer",
            x_scale="linear",
            x_ticks=layers,
        ),
        Panel(
            "attention paths after training",
            "tokens that a query reads, per head",
            {method_name(alpha): _layers(rows, alpha, end, "support") for alpha in ALPHAS},
            y_limits=(0, 0.52 * (n + 1)),
            x_label="layer",
            x_scale="linear",
            x_ticks=layers,
        ),
        Panel(
            "gradient of the first layer during training",
            "norm of the gradient at the layer's input",
            {method_name(alpha): _history(rows, alpha, 1) for alpha in ALPHAS},
            x_label="loss",
            x_ticks=(0.01, 0.1, 1),
            y_scale="log",
        ),
    ]
    draw(panels, path, width=5.4, height=4.2, columns=2)


def _table(rows: Sequence[Row]) -> list[Row]:
    end = max(row["step"] for row in rows)
    table: list[Row] = []
    for alpha in ALPHAS:
        gradient, read = (_layers(rows, alpha, end, what) for what in ("gradient", "support"))
        state, loss = (_mean(rows, alpha, end, 1, what) for what in ("state", "loss"))
        line: Row = {"method": method_name(alpha), "loss": loss}
        line |= {f"gradient, layer {layer}": gradient[layer] for layer in (1, LAYERS)}
        line["over softmax's, equal weights"] = _ratios(rows, alpha, 0)[1]
        line["d log loss / d log state"] = gradient[1] * state / loss
        line |= {f"read, layer {layer}": read[layer] for layer in (1, LAYERS)}
        table.append(line | {"log10 paths": _mean(rows, alpha, end, 1, "log10_paths")})
    return table


def _verdict(rows: Sequence[Row]) -> tuple[bool, str]:
    end, n = max(row["step"] for row in rows), rows[0]["n"]
    sparse = [alpha for alpha in ALPHAS if alpha > 1]
    paths = [_mean(rows, alpha, end, 1, "log10_paths") for alpha in ALPHAS]
    fewer = all(more > less for more, less in itertools.pairwise(paths))
    dense = all(support > 0.99 * (n + 1) / 2 for support in _layers(rows, 1.0, end, "support").values())
    by_seed = [[row for row in rows if row["seed"] == seed] for seed in sorted({row["seed"] for row in rows})]
    stronger = {alpha: [geometric_mean(_ratios(part, alpha, end).values()) for part in by_seed] for alpha in sparse}
    losses = {alpha: _mean(rows, alpha, end, 1, "loss") for alpha in ALPHAS}
    common = max(losses.values())
    histories = {alpha: _history(rows, alpha, 1) for alpha in ALPHAS}
    equal = {alpha: at_loss(histories[alpha], common) / at_loss(histories[1.0], common) for alpha in sparse}
    before = {alpha: _ratios(rows, alpha, 0)[1] for alpha in sparse}
    said = (
        f"Paths to the last token through {LAYERS} layers: "
        + ", ".join(f"10^{count:.1f} (α = {alpha:g})" for alpha, count in zip(ALPHAS, paths, strict=True))
        + ". Gradient norm over softmax's after training, mean over the layers, by seed: "
        + "; ".join(f"{', '.join(f'{r:.2f}' for r in ratios)} (α = {alpha:g})" for alpha, ratios in stronger.items())
        + ". But the losses differ too: "
        + ", ".join(f"{loss:.2g} (α = {alpha:g})" for alpha, loss in losses.items())
        + f". When each came down to {common:.2g}, the first layer's ratio was "
        + ", ".join(f"{ratio:.2f} (α = {alpha:g})" for alpha, ratio in equal.items())
        + "; before training, with equal weights, "
        + ", ".join(f"{ratio:.2f} (α = {alpha:g})" for alpha, ratio in before.items())
        + "."
    )
    return fewer and dense and all(geometric_mean(ratios) > 1 for ratios in stronger.values()), said


PROBE = Probe(
    name="over-squashing",
    claim="After training an 8-layer decoder on Delayed Copy, alpha-entmax has fewer attention paths the larger "
    "alpha, softmax has all, and gradients at the layers' inputs are larger under alpha-entmax, up to 6 times "
    "(Proposition 2).",
    measure=_measure,
    draw=_draw,
    table=_table,
    verdict=_verdict,
)
