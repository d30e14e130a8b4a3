"""What every head of a trained decoder does at a length: how far it spreads, where it looks and how it is scaled.

The weights of some query rows are built in blocks, from the scores up and by the layer's own normaliser: every method
is measured alike, and memory stays linear in the length. Weights of stick-breaking sum to less than one; the entropy
is then that of their shares.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longspan.functional.attention import scaled_queries
from longspan.functional.reference import dense_scores
from longspan.functional.scores import Rules, visible_tokens
from longspan.nn.attention import Attention
from longspan.nn.decoder import Decoder
from longspan.nn.llama import Llama
from longspan.nn.scalers import Adaptive, NoScale, Scalable, SSMax, softplus
from longspan.results import Row, now, provenance
from longspan.tasks.base import Task, stream_seed
from longspan.train.config import RunConfig, fingerprint

# Queries and keys of what a kernel takes or leaves as a whole in half precision, with heads up to 128; its tiles of
# other heads and of float32 are smaller, of which more may be dead.
TILE = 128
_WEIGHTS_AT_ONCE = 1 << 22


class Heads(NamedTuple):
    """What one layer's weights follow from, and the parts of its scale, each (batch, heads, time)."""

    q: Tensor  # (batch, heads, time, head_dim), scaled
    k: Tensor  # (batch, kv_heads, time, head_dim)
    rules: Rules
    parts: dict[str, Tensor]


def attention_layers(model: Decoder | Llama) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


@torch.no_grad()
def layer_inputs(model: Decoder | Llama, tokens: Tensor) -> list[Tensor]:
    """What every attention layer reads when the model reads `tokens`, each (batch, time, dim)."""
    inputs: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))
        for layer in attention_layers(model)
    ]
    try:
        model(tokens, only=torch.tensor([0], device=tokens.device))
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


@torch.no_grad()
def heads_of(layer: Attention, x: Tensor) -> Heads:
    """Queries, keys and scales of a layer that reads x (batch, time, dim)."""

    def split(projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)

    positions = torch.arange(x.shape[1], device=x.device)
    q = layer.position.rotate(layer.query_norm(split(layer.query(x))), positions)
    k = layer.position.rotate(layer.key_norm(split(layer.key(x))), positions)
    rules = Rules(layer.scale, layer.causal, layer.position.slopes)
    n = visible_tokens(rules, x.shape[1], x.shape[1], x.shape[0], x.device)  # (B, T)
    parts = scale_parts(layer, x, n)
    if parts:
        q = scaled_queries(q, torch.where(layer.position.scaled[:, None], parts["scale"], 1))
    return Heads(q, k, rules, parts)


def scale_parts(layer: Attention, x: Tensor, n: Tensor) -> dict[str, Tensor]:
    """`scale`, and the `beta` and `gamma` of those scalers that have them; nothing where nothing is scaled."""
    scaler = layer.scaler
    if isinstance(scaler, NoScale):
        return {}
    parts = {"scale": scaler(x, n)}
    like = parts["scale"]  # (B, H, T)
    if isinstance(scaler, SSMax):
        parts["beta"] = scaler.s[:, None].expand_as(like)
    elif isinstance(scaler, Scalable):
        parts["beta"], parts["gamma"] = (part[:, None].expand_as(like) for part in (scaler.beta, scaler.gamma))
    elif isinstance(scaler, Adaptive):
        parts["beta"] = softplus(scaler.beta(x)).transpose(1, 2)
        if isinstance(scaler.gamma, nn.Linear):
            parts["gamma"] = scaler.gamma_range * scaler.gamma(x).tanh().transpose(1, 2)
        else:
            parts["gamma"] = torch.full_like(like, scaler.gamma)
    return parts


@torch.no_grad()
def weights_of(layer: Attention, heads: Heads, rows: Tensor) -> Tensor:
    """The attention map of the query rows `rows`, (batch, heads, len(rows), time)."""
    return layer.normalizer(dense_scores(heads.q, heads.k, heads.rules, rows))


def weight_blocks(layer: Attention, heads: Heads, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """`rows` in blocks with their weights, so few at once that memory is bounded."""
    batch, num_heads, width, _ = heads.q.shape
    for block in rows.split(max(1, _WEIGHTS_AT_ONCE // (batch * num_heads * width))):
        yield block, weights_of(layer, heads, block)


def spread_of(weights: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """Statistics of weights (batch, heads, len(rows), time) of causal query rows beyond the first.

    Each (batch, heads, len(rows)): `support` counts weights above zero, `entropy` is normalised by the log of what the
    row sees, `distance` is how far back it looks on average.
    """
    shares = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    back = rows[:, None] - torch.arange(weights.shape[-1], device=weights.device)  # (rows, time)
    return {
        "support": (weights > 0).sum(-1).to(weights.dtype),
        "entropy": torch.special.entr(shares).sum(-1) / (rows + 1).to(weights.dtype).log(),
        "largest": weights.amax(-1),
        "distance": (shares * back).sum(-1),
    }


@torch.no_grad()
def live_tiles(layer: Attention, heads: Heads, blocks: Sequence[int]) -> Tensor:
    """The share of tiles with a weight above zero, of those that causal rows see, in blocks of TILE queries: (heads,).

    What is left of a map for a kernel that skips dead tiles; tiles on the diagonal are always live.
    """
    batch, num_heads, width, _ = heads.q.shape
    shares = []
    for block in blocks:
        rows = torch.arange(block * TILE, min((block + 1) * TILE, width), device=heads.q.device)
        kept = torch.zeros(batch, num_heads, width, dtype=torch.bool, device=heads.q.device)
        for _, weights in weight_blocks(layer, heads, rows):
            kept |= (weights > 0).any(2)
        tiles = nn.functional.pad(kept, (0, -width % TILE)).unflatten(-1, (-1, TILE)).any(-1)
        shares.append(tiles.double().sum(-1) / (block + 1))
    return torch.stack(shares).mean((0, 1))


def query_blocks(width: int, queries: int) -> list[int]:
    """Blocks of TILE queries, as many as hold `queries`, one at least, evenly spaced, the last one among them."""
    count = -(-width // TILE)
    wanted = min(count, max(1, queries // TILE))
    return sorted({round(count * (i + 1) / wanted) - 1 for i in range(wanted)})


def query_rows(width: int, queries: int) -> Tensor:
    """At most `queries` rows, evenly spaced, the last one among them; not the first, which sees but itself."""
    if width < 2:
        raise ValueError(f"a sequence of {width} token has nothing to attend to; take a longer length")
    return torch.linspace(1, width - 1, min(queries, width - 1), dtype=torch.float64).round().long().unique()


def sample_tokens(task: Task, length: int, samples: int, device: torch.device) -> Tensor:
    """Test sequences (samples, time) of a length; the same on every device."""
    generator = torch.Generator().manual_seed(stream_seed("test", length))
    return task.sample(samples, length, generator=generator).tokens.to(device)


def head_rows(model: Decoder, task: Task, length: int, samples: int = 8, queries: int = 256) -> list[Row]:
    """`rows_of_heads` on test samples of a task."""
    device = next(model.parameters()).device
    return rows_of_heads(model, sample_tokens(task, length, samples, device), length, queries)


def rows_of_heads(model: Decoder | Llama, tokens: Tensor, length: int, queries: int = 256) -> list[Row]:
    """A row for every layer and head: means over `queries` query rows of each of the sequences, (samples, time).

    Heads that are not scaled have None for `scale`, `beta` and `gamma`; so have methods without them.
    """
    device = next(model.parameters()).device
    rows = query_rows(tokens.shape[1], queries).to(device)
    blocks_of_rows = query_blocks(tokens.shape[1], queries)
    layers = attention_layers(model)
    seen: list[list[dict[str, Tensor]]] = [[] for _ in layers]  # by layer and sample: (heads, rows) by name
    for sequence in tokens.split(1):
        for layer, x, collected in zip(layers, layer_inputs(model, sequence), seen, strict=True):
            heads = heads_of(layer, x)
            blocks = [spread_of(weights, block) for block, weights in weight_blocks(layer, heads, rows)]
            spread = {name: torch.cat([block[name] for block in blocks], -1)[0] for name in blocks[0]}
            spread["tiles"] = live_tiles(layer, heads, blocks_of_rows)[:, None]
            collected.append(spread | {name: part[0][:, rows] for name, part in heads.parts.items()})
    return [
        {"length": length, "layer": number, "head": head + 1, "samples": len(tokens), "queries": len(rows)}
        | _head_row(layer, {name: torch.cat([sample[name][head] for sample in found]) for name in found[0]}, head)
        for number, (layer, found) in enumerate(zip(layers, seen, strict=True), start=1)
        for head in range(layer.num_heads)
    ]


def _head_row(layer: Attention, values: dict[str, Tensor], head: int) -> Row:
    slopes = layer.position.slopes
    row: Row = {"slope": None if slopes is None else slopes[head].item()}
    row |= {name: values[name].mean().item() for name in ("support", "tiles", "entropy", "largest", "distance")}
    scaled = bool(layer.position.scaled[head])
    row |= {
        name: values[name].mean().item() if scaled and name in values else None for name in ("scale", "beta", "gamma")
    }
    gamma = values["gamma"].float() if row["gamma"] is not None else None
    for name, share in (("gamma_low", 0.05), ("gamma_high", 0.95)):
        row[name] = None if gamma is None else gamma.quantile(share).item()
    row["gamma_negative"] = None if gamma is None else (gamma < 0).double().mean().item()
    return row


def map_rows(model: Decoder, task: Task, length: int, layers: Sequence[int], cells: int = 128) -> Iterator[Row]:
    """The attention maps of one sequence, max-pooled with window and stride `window` to at most `cells` a side.

    A row for every head of the layers numbered `layers`, from 1.
    """
    device = next(model.parameters()).device
    tokens = sample_tokens(task, length, 1, device)
    width = tokens.shape[1]
    window = -(-width // cells)
    every = torch.arange(width, device=device)
    inputs = layer_inputs(model, tokens)
    side = -(-width // window)
    for number in layers:
        layer = attention_layers(model)[number - 1]
        pooled = torch.zeros(layer.num_heads, side, side, device=device)
        for block, weights in weight_blocks(layer, heads_of(layer, inputs[number - 1]), every):
            columns = nn.functional.max_pool2d(weights[0], (1, window), ceil_mode=True)  # (heads, rows, side)
            place = (block // window)[:, None].expand_as(columns)
            pooled.scatter_reduce_(1, place, columns, "amax")
        for head, grid in enumerate(pooled.tolist(), start=1):
            # Three digits that count, so that a small weight does not become a zero.
            rounded = [[float(f"{weight:.3g}") for weight in line] for line in grid]
            yield {"length": length, "layer": number, "head": head, "window": window, "weights": rounded}


def origin_of(config: RunConfig, step: int, device: torch.device) -> Row:
    """Which model rows come from, where and when."""
    return {
        "task": config.task,
        "method": config.model.attention.method,
        "position": config.model.attention.position,
        "trained_to": config.longest,
        "recipe": config.name,
        "seed": config.seed,
        "step": step,
        "config": fingerprint(config),
        "time": now(),
        **provenance(device),
    }
