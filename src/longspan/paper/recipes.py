"""How each cell of the paper's synthetic tables is trained: `paper/<task>/<position>/<method>`.

Sizes, samples and lengths are those of the paper's table of task details; warm-up, betas, learning rates and the start
of the scalers are the released code's where the paper is silent or differs (a warm-up of 20K steps, for instance).
`longspan/<task>/<position>/<method>` are the same cells by our recipe: Muon, a running average of the weights and far
fewer steps; for the sparse methods RMS norm on queries and keys, whose small gains make attention start near uniform,
scales that start at 1 and grow like log n, on MQMTAR, Reverse, Copy and sparse Flip-Flop noise on queries and keys once
the task is learned, and on MQMTAR, Flip-Flop and Local Count exponential slopes. Sort is trained the paper's way, and
is the one task where our recipe changes what is trained on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from longspan.nn.decoder import AttentionConfig, DecoderConfig
from longspan.paper.tables import get_table
from longspan.tasks import get_task
from longspan.train.config import OptimizerConfig, RunConfig


@dataclass(frozen=True)
class _Cell:
    """The paper's row of task details."""

    layers: int
    dim: int
    hidden: int
    heads: int
    steps: int  # samples / 128
    learning_rate: float
    warmup: int = 20_000


_CELLS = {
    "2back": _Cell(2, 256, 512, 8, 78_125, 1e-3),
    "local_count": _Cell(3, 128, 512, 8, 78_125, 1e-3),
    "flip_flop_sparse": _Cell(4, 256, 512, 8, 78_125, 1e-3, warmup=10_000),
    "flip_flop_dense": _Cell(4, 256, 512, 8, 78_125, 1e-3, warmup=10_000),
    "copy": _Cell(2, 256, 1024, 16, 156_250, 1e-3),
    "reverse": _Cell(6, 256, 512, 8, 234_375, 4e-4),
    "mqmtar": _Cell(4, 512, 1024, 16, 390_625, 2e-4),
    "sort": _Cell(2, 256, 1024, 8, 312_500, 4e-4),
}

# For the sparse methods, see LOG.md. Noise on q and k once a task is learned asks for the margins, here for the longer
# contexts to match by, that a longer sequence needs; on all heads, or else some are a quiet place to do without.
# Heads of 16, as Copy's are, bear half of it. MQMTAR: windows from 2 tokens to 256, as under 1/h none reaches a query;
# Flip-Flop and Local Count: from 4 to 256, as the last write, or the beginning of a block, may be far away.
_OURS_IF_SPARSE: dict[str, dict[str, Any]] = {
    "mqmtar": {"slopes": "exponential", "qk_noise": 1.0, "qk_noise_on": "all"},
    "reverse": {"qk_noise": 1.0, "qk_noise_on": "all"},
    "copy": {"qk_noise": 0.5, "qk_noise_on": "all"},
    "flip_flop_sparse": {"slopes": "exponential", "qk_noise": 1.0, "qk_noise_on": "all"},
    "flip_flop_dense": {"slopes": "exponential"},
    "local_count": {"slopes": "exponential"},
}
_OUR_STEPS = {"mqmtar": 10_000, "reverse": 10_000, "copy": 10_000}

POSITIONS = {
    "rope": AttentionConfig(position="rope", rope_factor=16.0),
    "nope": AttentionConfig(position="nope"),
    "alibi": AttentionConfig(position="alibi"),
    "nape": AttentionConfig(position="nape"),
}


def _methods(attention: AttentionConfig) -> dict[str, AttentionConfig]:
    """The paper's methods at one position; stick-breaking is a position of its own kind."""
    plain = ("softmax", "ssmax", "assmax", "entmax", "sentmax", "asentmax")
    methods = {name: replace(attention, method=name) for name in plain}
    methods["topk_16"] = replace(attention, method="topk", top_k=16)
    methods["topk_32"] = replace(attention, method="topk", top_k=32)
    methods["topk_half"] = replace(attention, method="topk", top_fraction=0.5)
    if attention.position == "nope":
        methods["stick_breaking"] = replace(attention, method="stick_breaking")
    return methods


def recipe_names() -> list[str]:
    """Every recipe."""
    return [f"{author}/{name}" for author in ("paper", "longspan") for name in _cell_names()]


def _cell_names() -> Iterator[str]:
    for task in _CELLS:
        for position, attention in POSITIONS.items():
            yield from (f"{task}/{position}/{method}" for method in _methods(attention))


def recipe(name: str) -> RunConfig:
    """The config of a recipe, or an error that says what there is."""
    author, _, cell = name.partition("/")
    if author not in ("paper", "longspan") or cell not in set(_cell_names()):
        raise ValueError(
            f"there is no recipe {name!r}; `longspan recipes` lists them, such as paper/copy/nape/asentmax"
        )
    task, position, method = cell.split("/")
    config = _paper(name, task, _methods(POSITIONS[position])[method])
    return config if author == "paper" else _ours(config)


def smoke(config: RunConfig) -> RunConfig:
    """A recipe at a size that trains in seconds on a CPU: the same code, few symbols, short sequences."""
    options: dict[str, float] = {}
    if config.task in ("copy", "reverse", "sort"):
        options = {"num_symbols": 8}
    elif config.task == "mqmtar":
        options = {"alphabet": 16, "num_words": 64, "num_queries": 2}
    shortest, longest = {"mqmtar": (15, 24), "local_count": (16, 32)}.get(config.task, (4, 12))
    vocabulary = get_task(config.task, **options).vocabulary
    attention = replace(config.model.attention, qk_noise=0.0)  # it pays in long runs only
    return replace(
        config,
        name=f"{config.name}/smoke",
        task_options=options,
        model=replace(config.model, vocabulary=vocabulary, layers=2, dim=64, hidden=128, heads=4, attention=attention),
        optimizer=replace(
            config.optimizer, name="muon", learning_rate=3e-3, muon_learning_rate=0.02, warmup=50, clip=1.0
        ),
        steps=800,
        batch=64,
        shortest=shortest,
        longest=longest,
        average=None,
        precision="float32",
        log_every=20,
        save_every=400,
        validate_every=None,
        validate_lengths=(longest,),
        test_lengths=(longest, 2 * longest, 4 * longest),
        test_samples=200,
    )


def _paper(name: str, task: str, attention: AttentionConfig) -> RunConfig:
    cell, kind = _CELLS[task], get_task(task)
    shortest, longest = kind.train_lengths
    return RunConfig(
        task=task,
        name=name,
        model=DecoderConfig(
            vocabulary=kind.vocabulary,
            layers=cell.layers,
            dim=cell.dim,
            hidden=cell.hidden,
            heads=cell.heads,
            attention=replace(attention, initial_beta=None, rope_original_length=longest),
        ),
        optimizer=OptimizerConfig("adamw", learning_rate=cell.learning_rate, warmup=cell.warmup),
        steps=cell.steps,
        shortest=shortest,
        longest=longest,
        precision="bfloat16",
        save_every=5_000,
        validate_every=5_000,
        validate_lengths=(2 * longest, 8 * longest),
        test_lengths=get_table(task).lengths,
    )


def _our_sort(config: RunConfig) -> RunConfig:
    """The paper's training for half as long, steep slopes, half of the sources of some symbols only; see LOG.md.

    A model counts copies to know where a run of equal symbols ends, and 512 symbols repeat as often as 64 hardly ever
    do; nothing is to be found within a window.
    """
    attention = replace(config.model.attention, slope_factor=16.0)
    return replace(
        config,
        model=replace(config.model, attention=attention),
        training_options={"few": 0.5},
        steps=150_000,
        average=0.999,
        validate_lengths=tuple(multiple * config.longest for multiple in (2, 4, 8)),
    )


def _ours(config: RunConfig) -> RunConfig:
    if config.task == "sort":
        return _our_sort(config)
    attention = config.model.attention
    attention = replace(attention, delta=0.0, initial_beta=0.25, initial_gamma=1.0)  # 1 at 53 tokens, and like log n
    # Norms on q and k make what the sparse methods learn last beyond the training length. Whether the others gain by
    # them, and by the noise, is chosen by validation.
    if attention.method in ("entmax", "sentmax", "asentmax"):
        attention = replace(attention, qk_norm=True, qk_gain=0.4, **_OURS_IF_SPARSE.get(config.task, {}))
    return replace(
        config,
        model=replace(config.model, attention=attention),
        optimizer=OptimizerConfig("muon", learning_rate=1e-3, muon_learning_rate=0.01, warmup=500),
        steps=_OUR_STEPS.get(config.task, 20_000),
        average=0.999,
        save_every=2_000,
        validate_every=2_000,
        validate_lengths=tuple(multiple * config.longest for multiple in (2, 4, 8)),
    )
