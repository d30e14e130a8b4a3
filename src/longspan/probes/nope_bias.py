"""NoPE's bias to the first token: where the product of causal attention matrices P(l) ... P(0) goes with depth.

Row i of the product is a walk from token i that steps to an earlier token or stays, layer by layer; token 1 absorbs it.
With ``eta_l = min_{1 < j <= i} sum_{k < j} p_jk``, the least weight that any token gives to its past in layer l, the
walk has a coin of at least eta_l to step back in each layer and needs at most i - 1 steps:

    1 - p~_i1  <=  P(B < i - 1),     B a sum of independent coins eta_0, ..., eta_l.

So p~_i1 goes to 1 whenever the eta_l sum to infinity, which they do under softmax of bounded logits, and at the rate
l^(i-2) (1 - eta)^l when they are at least eta. For i = 2 the condition is also necessary.

The paper's proposition asks for less, a path from token 1 to token i in every layer, and that is not enough: the path
may lead past a token that looks only at itself ("fork", "relay"), and weights, which entmax does not bound from below,
may fade ("fading"). Nor does one layer without a path keep the limit below 1 ("one cut"): a product of sums is not
zero because one term is.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.functional import entmax
from longspan.probes.base import Probe, Report, Size, method_name
from longspan.results import Row

ALPHAS = (1.0, 1.5, 2.0)
TOKENS, CHANNELS = 32, 8
SCALES = (1.0, 2.0, 4.0)  # of the network's scores
DEPTH: dict[Size, int] = {"small": 64, "paper": 512}
DRAWS: dict[Size, int] = {"small": 16, "paper": 64}


def logits_of(weights: Tensor, alpha: float) -> Tensor:
    """Bounded logits whose alpha-entmax is `weights`: the threshold is 0, and what has no weight lies 1 below it."""
    return torch.where(weights > 0, weights.pow(alpha - 1) / (alpha - 1), -1)


def layers_of(name: str, depth: int, alpha: float) -> Iterator[Tensor]:
    """The attention matrices of an example, first layer first, as alpha-entmax of bounded logits gives them."""
    eye = torch.eye(4, dtype=torch.float64)
    for layer in range(depth):
        p = eye.clone()
        match name:
            case "fork":  # token 3 looks at 1, 2 and itself, token 2 at itself
                p[2] = (eye[0] + eye[1] + eye[2]) / 3
            case "relay" if layer % 2:
                p[3] = eye[0]
                p[2] = eye[1]
            case "relay":
                p[3] = eye[2]
                p[2] = eye[0]
            case "fading":
                p[1] = eye[0] * 2.0 ** -(layer + 1) + eye[1] * (1 - 2.0 ** -(layer + 1))
            case "one cut" if layer != 2:
                p[1] = (eye[0] + eye[1]) / 2
            case "chain":  # the rate of the bound
                p[1:] = 0.75 * eye[1:] + 0.25 * eye[:-1]
        yield entmax(logits_of(p, alpha).masked_fill(torch.ones(4, 4).triu(1) > 0, -torch.inf), alpha)


class Example(NamedTuple):
    token: int
    limits: tuple[float, ...]  # of p~_i1; two where even and odd depths differ


EXAMPLES = {
    "fork": Example(3, (0.5,)),
    "relay": Example(4, (0.0, 1.0)),
    "fading": Example(2, (0.711212,)),  # 1 - prod (1 - 2^-l)
    "one cut": Example(2, (1.0,)),
    "chain": Example(4, (1.0,)),
}


def network_layers(alpha: float, scale: float, depth: int, draws: int) -> Iterator[Tensor]:
    """Attention alone, no positions: random unit tokens, identity projections, each layer feeding the next."""
    x = torch.randn(draws, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x / x.norm(dim=-1, keepdim=True)
    hidden = torch.ones(TOKENS, TOKENS).triu(1) > 0
    for _ in range(depth):
        p = entmax((scale * x @ x.mT).masked_fill(hidden, -torch.inf), alpha)
        yield p
        x = p @ x


def past_weight(p: Tensor, token: int) -> float:
    """eta: the least weight that tokens 2 ... `token` give to the tokens before them."""
    own = p.diagonal(dim1=-2, dim2=-1)[..., 1:token]
    return float((1 - own).min()) if token > 1 else 1.0


def bound(etas: Sequence[float], token: int) -> float:
    """P(B < token - 1): an upper bound on what token `token` does not get from token 1."""
    steps = torch.zeros(token, dtype=torch.float64)  # of s steps back; the last, of all that are needed
    steps[0] = 1
    for eta in etas:
        moved = eta * steps[:-1]
        steps[:-1] -= moved
        steps[1:] += moved
    return float(steps[:-1].sum())


def _follow(layers: Iterator[Tensor], token: int) -> tuple[list[float], list[float], list[float]]:
    """By depth: the mean of p~_i1, the least of it, and what the bound leaves for it."""
    product, etas = None, []
    means, least, bounds = [], [], []
    for p in layers:
        product = p if product is None else p @ product
        etas.append(past_weight(p, token))
        first = product[..., token - 1, 0]
        means.append(first.mean().item())
        least.append(first.min().item())
        bounds.append(1 - bound(etas, token))
    return means, least, bounds


def _measure(size: Size, report: Report) -> Iterator[Row]:
    cells = [(name, alpha, 0.0) for name in EXAMPLES for alpha in ALPHAS[1:]]
    cells += [("network", alpha, scale) for alpha in ALPHAS for scale in SCALES]
    for done, (name, alpha, scale) in enumerate(cells):
        report(done, len(cells), f"{name}, alpha {alpha:g}")
        if name == "network":
            layers, token = network_layers(alpha, scale, DEPTH[size], DRAWS[size]), TOKENS
        else:
            layers, token = layers_of(name, DEPTH[size], alpha), EXAMPLES[name].token
        means, least, bounds = _follow(layers, token)
        yield {
            "example": name,
            "alpha": alpha,
            "scale": scale,
            "token": token,
            "first": means,
            "least": least,
            "bound": bounds,
        }
    report(len(cells), len(cells), "")


def _row(rows: Sequence[Row], example: str, alpha: float, scale: float = 0.0) -> Row:
    return next(row for row in rows if (row["example"], row["alpha"], row["scale"]) == (example, alpha, scale))


def _draw(rows: Sequence[Row], path: Path) -> None:
    from longspan.plots import PALETTE, Panel, draw

    shown = 24
    panels = [
        Panel(
            f"attention network, scores × {scale:g}",
            f"weight of token 1 in token {TOKENS}, mean",
            {
                method_name(alpha): dict(enumerate(_row(rows, "network", alpha, scale)["first"], start=1))
                for alpha in ALPHAS
            },
            x_label="depth",
            x_ticks=[n for n in (1, 4, 16, 64, 256) if n <= len(rows[0]["first"])],
            y_limits=(-0.03, 1.05),
            marker="",
        )
        for scale in SCALES
    ]
    examples = {name: dict(enumerate(_row(rows, name, ALPHAS[1])["first"][:shown], start=1)) for name in EXAMPLES}
    panels.append(
        Panel(
            f"examples, {method_name(ALPHAS[1])}",
            "weight of token 1",
            examples,
            x_label="depth",
            x_scale="linear",
            y_limits=(-0.03, 1.05),
            colours=dict(zip(examples, (PALETTE[1], "#c9c9c9", PALETTE[3], PALETTE[5], PALETTE[2]), strict=True)),
        )
    )
    draw(panels, path, width=5.0, height=3.6, columns=2)


def _table(rows: Sequence[Row]) -> list[Row]:
    return [
        {
            "layers": row["example"],
            "method": method_name(row["alpha"]),
            "scale": row["scale"] or None,
            "from token": row["token"],
            "depth 2": row["first"][1],
            "depth 16": row["first"][15],
            "last but one": row["first"][-2],
            "last": row["first"][-1],
            "at least": row["bound"][-1],
        }
        for row in rows
    ]


def _verdict(rows: Sequence[Row]) -> tuple[bool, str]:
    agree = True
    for name, example in EXAMPLES.items():
        for alpha in ALPHAS[1:]:
            reached = sorted(_row(rows, name, alpha)["first"][-len(example.limits) :])
            agree &= all(abs(value - limit) < 1e-4 for value, limit in zip(reached, example.limits, strict=True))
    slack = min(least - bound for row in rows for least, bound in zip(row["least"], row["bound"], strict=True))
    chain = _row(rows, "chain", ALPHAS[1])
    agree &= max(abs(a - b) for a, b in zip(chain["first"], chain["bound"], strict=True)) < 1e-9
    ends = {(alpha, scale): _row(rows, "network", alpha, scale)["first"][-1] for alpha in ALPHAS for scale in SCALES}
    rises = all(
        (first := _row(rows, "network", 1.0, scale)["first"])[-1] > first[len(first) // 2] - 1e-9 for scale in SCALES
    )
    agree &= slack > -1e-9 and rises and all(ends[1.0, scale] > 0.9 for scale in SCALES) and ends[1.5, SCALES[-1]] < 0.5
    by_method = (", ".join(f"{ends[alpha, scale]:.3f}" for scale in SCALES) for alpha in ALPHAS)
    shares = "; ".join(f"{ends} under {method_name(alpha)}" for ends, alpha in zip(by_method, ALPHAS, strict=True))
    last = {name: _row(rows, name, ALPHAS[1])["first"][-1] for name in EXAMPLES}
    said = (
        f"At depth {len(rows[0]['first'])} token {TOKENS} is made of token 1 to {shares} (scores × "
        f"{', '.join(f'{scale:g}' for scale in SCALES)}). The bound by coins is never violated, and attained by the "
        f"chain. With a path in every layer the weight ends at {last['fork']:.2f} (fork), {last['fading']:.3f} "
        f"(fading), 0 and 1 in turn (relay); with one layer cut it is {last['one cut']:.3f}."
    )
    return agree, said


PROBE = Probe(
    name="nope-bias",
    claim="Without positions, depth carries softmax attention to the first token; alpha-entmax can cut the paths and "
    "stop it (proposition on NoPE; its conditions for when need correcting).",
    measure=_measure,
    draw=_draw,
    table=_table,
    verdict=_verdict,
)
