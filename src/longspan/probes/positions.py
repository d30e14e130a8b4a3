"""Figure 4 and the appendix's simulated heads: what NoPE, ALiBi and RoPE make of the same content logits.

The appendix draws, for n = 128, ``z_ij = U(-5, 5) + 2 (1 - |i-j| / 2i) + N(0, 0.5^2)`` and follows the centroid
``sum_j j p_ij`` of every query in every head. Head h of H has its own draw, for ALiBi the slope 2^(-h/H), and for RoPE
the rate g = 10,000^(-(h-1)/H): the paper does not say how it rotates logits that have no vectors, so a head here is one
aligned chunk, ``z_ij cos(g (i-j))``.

Centroids are read against the identity in the paper, and so NoPE appears to favour early tokens. But attention without
any preference has its centroid at (i+1)/2, half of the identity; against that the bias is to *late* tokens, as the
proximity term of the logits says it must be. Keys in RoPE's dead zones, where the cosine is below 1/2 in size, cannot
win: what survives lies in bands around the multiples of pi/g.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from longspan.functional import entmax
from longspan.probes.alibi_window import sharp_bound
from longspan.probes.base import Probe, Report, Size, method_name
from longspan.results import Row

ALPHAS = (1.0, 1.5)
SPREAD, NOISE = 10.0, 0.5  # Z_max - Z_min, sigma
LENGTH = 128
HEADS: dict[Size, int] = {"small": 4, "paper": 8}
DRAWS: dict[Size, int] = {"small": 16, "paper": 128}
POSITIONS = ("nope", "alibi", "rope")
PROFILE_HEAD = 2  # whose last query is drawn


def contents(head: int, draws: int) -> Tensor:
    """The appendix's logits (draws, query, key); keys after the query are -inf."""
    generator = torch.Generator().manual_seed(head)
    query = torch.arange(1, LENGTH + 1, dtype=torch.float64)[:, None]
    distance = query - query.T
    shape = (draws, LENGTH, LENGTH)
    base = SPREAD * (torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5)
    near = 0.2 * SPREAD * (1 - 0.5 * distance.abs() / query)
    noise = NOISE * torch.randn(shape, generator=generator, dtype=torch.float64)
    return (base + near + noise).masked_fill(distance < 0, -math.inf)


def encoded(z: Tensor, position: str, head: int, heads: int) -> Tensor:
    """The logits of head 1 ... `heads` under a position encoding."""
    steps = torch.arange(LENGTH, dtype=torch.float64)
    distance = (steps[:, None] - steps).clamp_min(0)
    if position == "alibi":
        return z - slope(head, heads) * distance
    if position == "rope":
        return torch.where(z > -math.inf, z * (rate(head, heads) * distance).cos(), z)
    return z


def slope(head: int, heads: int) -> float:
    """The paper's definition, 2^(-h/H)."""
    return float(2 ** (-head / heads))


def rate(head: int, heads: int) -> float:
    """Of RoPE: fast heads first."""
    return float(10_000 ** (-(head - 1) / heads))


def centroids(weights: Tensor) -> Tensor:
    """sum_j j p_ij of every query, positions from 1."""
    return weights @ torch.arange(1, weights.shape[-1] + 1, dtype=weights.dtype)


def _measure(size: Size, report: Report) -> Iterator[Row]:
    heads = HEADS[size]
    steps = [(position, head) for position in POSITIONS for head in range(1, heads + 1)]
    queries = torch.arange(1, LENGTH + 1)
    distance = queries[:, None] - queries
    late = slice(LENGTH // 2, None)  # means are over the queries with many keys to choose from, and all draws
    for done, (position, head) in enumerate(steps):
        report(done, len(steps), f"{position}, head {head}")
        drawn = contents(head, DRAWS[size])
        spread = (drawn[..., distance >= 0].max() - drawn[..., distance >= 0].min()).item()
        dead = ((rate(head, heads) * distance).cos().abs() < 0.5) & (distance >= 0)
        for alpha in ALPHAS:
            p = entmax(encoded(drawn, position, head, heads), alpha)
            centre = centroids(p)
            windowed = position == "alibi" and alpha > 1
            yield {
                "position": position,
                "head": head,
                "alpha": alpha,
                "profile": p[0, -1].tolist(),
                "centroid": centre[0].tolist(),
                "relative_centroid": (centre / queries)[:, late].mean().item(),
                "roughness": centre.diff(dim=-1)[:, late].abs().mean().item(),
                "entropy": torch.special.entr(p)[:, late].sum(-1).mean().item(),
                "support": (p > 0).double().sum(-1)[:, late].mean().item(),
                "least": p[:, distance >= 0].min().item(),
                "farthest": int(distance.expand_as(p)[p > 0].max()),
                "window": sharp_bound(spread, slope(head, heads), alpha) if windowed else None,
                "dead_zones": (p * dead)[:, late].sum(-1).mean().item() if position == "rope" else None,
                "dead_keys": dead.double()[late].mean().item() if position == "rope" else None,
            }
    report(len(steps), len(steps), "")


def _of(rows: Sequence[Row], position: str, alpha: float) -> list[Row]:
    return [row for row in rows if row["position"] == position and row["alpha"] == alpha]


def _mean(rows: Sequence[Row], what: str) -> float:
    return float(sum(row[what] for row in rows) / len(rows))


def _draw(rows: Sequence[Row], path: Path) -> None:
    from longspan.plots import PALETTE, Panel, draw

    names = {"nope": "NoPE", "alibi": "ALiBi", "rope": "RoPE"}
    profiles, followed = [], []
    for position, name in names.items():
        lines = {alpha: _of(rows, position, alpha) for alpha in ALPHAS}
        profiles.append(
            Panel(
                f"{name}: weights of the last query",
                "weight",
                {
                    method_name(alpha): dict(enumerate(lines[alpha][PROFILE_HEAD - 1]["profile"], start=1))
                    for alpha in ALPHAS
                },
                x_label="key",
                x_scale="linear",
                y_scale="log",  # so that a zero falls off the axis
                y_limits=(1e-9, 3),
                marker=".",
            )
        )
        heads = [row for row in lines[ALPHAS[-1]] if row["head"] <= len(PALETTE)]
        curves = {f"head {row['head']}": dict(enumerate(row["centroid"], start=1)) for row in heads}
        reference = {"all": {1: 1.0, LENGTH: float(LENGTH)}, "even": {1: 1.0, LENGTH: (LENGTH + 1) / 2}}
        followed.append(
            Panel(
                f"{name}: centroids, {method_name(ALPHAS[-1])}",
                "centroid of the attention",
                curves,
                reference,
                "the query itself, and even attention",
                x_label="query",
                x_scale="linear",
                colours=dict(zip(curves, PALETTE, strict=False)) | {"all": "black", "even": "black"},
                marker="",
            )
        )
    draw(profiles + followed, path, width=4.6, height=3.4, columns=3)


def _table(rows: Sequence[Row]) -> list[Row]:
    table: list[Row] = []
    for position in POSITIONS:
        for alpha in ALPHAS:
            lines = _of(rows, position, alpha)
            line: Row = {"position": position, "method": method_name(alpha)}
            line |= {what: _mean(lines, what) for what in ("relative_centroid", "roughness", "entropy", "support")}
            table.append(line | {"farthest": max(row["farthest"] for row in lines)})
    return table


def _verdict(rows: Sequence[Row]) -> tuple[bool, str]:
    nope, alibi, rope = (_of(rows, position, ALPHAS[-1]) for position in POSITIONS)
    turning = [row for row in rope if row["dead_keys"] > 0.1]  # the slowest heads do not get to a dead zone
    agree = all((row["least"] > 0) == (row["alpha"] == 1) for row in rows)
    agree &= all(row["farthest"] <= row["window"] for row in alibi) and bool(turning)
    agree &= all(row["dead_zones"] < row["dead_keys"] / 10 for row in turning)
    centre = {name: _mean(lines, "relative_centroid") for name, lines in (("nope", nope), ("alibi", alibi))}
    agree &= 0.5 < centre["nope"] < 0.8 and centre["alibi"] > 0.95
    entropy = [_mean(lines, "entropy") for lines in (nope, alibi, rope)]
    agree &= entropy[1] < entropy[2] < entropy[0]
    agree &= _mean(rope, "roughness") > _mean(nope, "roughness") > _mean(alibi, "roughness")
    said = (
        f"Under entmax 1.5 the farthest key with weight under ALiBi is {max(row['farthest'] for row in alibi)} away "
        f"(at most {max(row['window'] for row in alibi)} possible); RoPE puts {_mean(turning, 'dead_zones'):.2%} "
        f"of its weight on the {_mean(turning, 'dead_keys'):.0%} of keys in dead zones. Centroids lie at "
        f"{centre['nope']:.2f} i under NoPE, {centre['alibi']:.2f} i under ALiBi; even attention is at 0.5 i, so NoPE "
        f"is late, not early. Entropies {entropy[0]:.2f}, {entropy[1]:.2f}, {entropy[2]:.2f} (NoPE, ALiBi, RoPE)."
    )
    return agree, said


PROBE = Probe(
    name="positions",
    claim="Under alpha-entmax NoPE gives content-driven sparsity, ALiBi windows with a clear cut-off, RoPE patterns "
    "that depend on frequency with dead zones; under softmax every key has weight (Figure 4, per-head centroids).",
    measure=_measure,
    draw=_draw,
    table=_table,
    verdict=_verdict,
)
