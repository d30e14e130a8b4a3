"""A run as a value: frozen, typed, printable as JSON, and editable by the path of a field."""

import dataclasses
import hashlib
import json
import sys
import types
import typing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from longspan.nn.decoder import AttentionConfig, DecoderConfig

Config = TypeVar("Config")
Precision = Literal["float32", "bfloat16"]

# Fields younger than the first published results, and what they were before.
_YOUNGER = {
    ("model", "attention", "initial_gamma"): 0.0,
    ("model", "attention", "qk_gain"): 1.0,
    ("model", "attention", "qk_noise"): 0.0,
    ("model", "attention", "qk_noise_on"): "scaled",
    ("model", "attention", "qk_noise_layers"): None,
    ("model", "attention", "slope_factor"): 1.0,
    ("noise_from",): 0.9,
    ("training_options",): {},
    ("first_alphas",): (),
}


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW on everything, or Muon on the hidden matrices and AdamW on the rest."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-3  # of AdamW
    muon_learning_rate: float = 0.01
    momentum: float = 0.95  # of Muon
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    warmup: int = 1000
    clip: float | None = 1.0  # of the gradient's norm


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a training run."""

    task: str
    model: DecoderConfig
    name: str = ""
    task_options: dict[str, float] = field(default_factory=dict)
    training_options: dict[str, float] = field(default_factory=dict)  # of the task, beyond those, in training alone
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    steps: int = 10_000
    batch: int = 128
    shortest: int = 32
    longest: int = 64
    seed: int = 0
    average: float | None = None  # decay of the running average of the weights, which is then what is evaluated
    noise_from: float = 0.9  # the token accuracy, a running mean, from which on there is `model.attention.qk_noise`
    first_alphas: tuple[tuple[int, float], ...] = ()  # (until this step, this alpha), in their order; then the model's
    precision: Precision = "float32"
    log_every: int = 100
    save_every: int = 1000
    validate_every: int | None = None  # steps; None: at the end only
    validate_lengths: tuple[int, ...] = ()
    validate_samples: int = 256
    test_lengths: tuple[int, ...] = ()
    test_samples: int = 1000


def to_json(config: Any) -> dict[str, Any]:
    """The fields of a config, nested."""
    return dataclasses.asdict(config)


def from_json(cls: type[Config], data: dict[str, Any]) -> Config:
    """A config from its fields; unknown fields and wrong types are errors that name the field."""
    return _build(cls, data, "")


def read_fields(path: Path) -> dict[str, Any]:
    """The fields of a config from its file; an error names the file."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: not an object of JSON")
    return fields


def fingerprint(config: RunConfig) -> str:
    """Twelve hex digits that two runs share exactly when they train the same way from the same seed.

    How often a run logs, saves and is measured is left out, and so are fields younger than the first published results
    where they change nothing.
    """
    watched = {"name", "log_every", "save_every"}
    typed = from_json(RunConfig, to_json(config))  # a learning rate of 1 is one of 1.0
    fields = {
        key: value
        for key, value in to_json(typed).items()
        if key not in watched and not key.startswith(("validate_", "test_"))
    }
    tell_start(fields["model"]["attention"])
    for (*path, name), before in _YOUNGER.items():
        holder = fields
        for key in path:
            holder = holder[key]
        if holder[name] == before:
            del holder[name]
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=6).hexdigest()


def tell_start(attention: dict[str, Any]) -> None:
    """For fingerprints: SEntmax was once built with a delta of 1 and a start that was drawn, whatever was asked for."""
    if attention["method"] == "sentmax" and (attention["delta"], attention["initial_beta"]) != (1.0, None):
        attention["start"] = "of the config"


def check(config: RunConfig) -> None:
    """Raises ValueError for a run that cannot be, by the name of the field."""
    for name in ("steps", "batch", "shortest", "log_every", "save_every", "validate_samples", "test_samples"):
        _at_least(1, name, getattr(config, name))
    if config.validate_every is not None:
        _at_least(1, "validate_every", config.validate_every)
    if config.shortest > config.longest:
        raise ValueError(f"shortest ({config.shortest}) must not be above longest ({config.longest})")
    if not 0 <= config.noise_from <= 1:
        raise ValueError(f"noise_from must be between 0 and 1, got {config.noise_from}")
    if config.average is not None and not 0 <= config.average < 1:
        raise ValueError(f"average must be at least 0 and below 1, got {config.average}")
    check_training(config.model, config.optimizer, config.seed)
    if config.first_alphas:
        _check_first_alphas(config)


def check_training(model: DecoderConfig, optimizer: OptimizerConfig, seed: int) -> None:
    """Raises ValueError for what no run of any kind can have."""
    for name in ("layers", "dim", "hidden", "heads"):
        _at_least(1, f"model.{name}", getattr(model, name))
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be at least 0 and below 2^64, got {seed}")
    _check_optimizer(optimizer)


def _at_least(least: int, name: str, value: float) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    for name in ("learning_rate", "muon_learning_rate", "weight_decay", "warmup"):
        _at_least(0, f"optimizer.{name}", getattr(optimizer, name))
    if not 0 <= optimizer.momentum < 1:
        raise ValueError(f"optimizer.momentum must be at least 0 and below 1, got {optimizer.momentum}")
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        raise ValueError(f"optimizer.betas must be at least 0 and below 1, got {list(optimizer.betas)}")
    if optimizer.clip is not None and optimizer.clip <= 0:
        raise ValueError(f"optimizer.clip must be above 0, or null, got {optimizer.clip}")


def _check_first_alphas(config: RunConfig) -> None:
    attention, (ends, alphas) = config.model.attention, zip(*config.first_alphas, strict=True)
    if attention.method not in ("entmax", "sentmax", "asentmax") or attention.alpha == "learned":
        raise ValueError(
            f"first_alphas are for entmax with an alpha of its own, got {attention.method} and {attention.alpha}"
        )
    if any(later <= earlier for earlier, later in pairwise((0, *ends))):
        raise ValueError(f"first_alphas must end one after the other, got {list(ends)}")
    if not all(1 <= alpha <= 64 for alpha in alphas):
        raise ValueError(f"first_alphas must be between 1 and 64, got {list(alphas)}")


def edited(config: Config, path: str, value: Any) -> Config:
    """`config` with the field at a dotted path, such as ``model.attention.alpha``, set to `value` (text is parsed)."""
    head, _, rest = path.partition(".")
    hints = _hints(type(config))
    if head not in hints:
        raise ValueError(f"there is no field {path!r}; {type(config).__name__} has {', '.join(hints)}")
    if rest:
        inner = getattr(config, head)
        if not dataclasses.is_dataclass(inner):
            raise ValueError(f"{head!r} is a plain value and has no field {rest!r}")
        new = edited(inner, rest, value)
    else:
        new = _convert(hints[head], _parsed(value) if isinstance(value, str) else value, head)
    return dataclasses.replace(config, **{head: new})  # type: ignore[type-var]


def _parsed(text: str) -> Any:
    """JSON where it is JSON, otherwise the text itself: numbers, null, lists and plain words all come out right."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None if text == "None" else text


def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(cls: type[Config], data: dict[str, Any], path: str) -> Config:
    hints = _hints(cls)
    unknown = set(data) - set(hints)
    if unknown:
        raise ValueError(f"{path.rstrip('.') or cls.__name__}: unknown fields {', '.join(sorted(unknown))}")
    try:
        return cls(**{key: _convert(hints[key], value, f"{path}{key}") for key, value in data.items()})
    except TypeError as error:
        raise ValueError(f"{path.rstrip('.') or cls.__name__}: {error}") from error


def _convert(hint: Any, value: Any, path: str) -> Any:
    """`value` as the type `hint`, or an error that names the field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _build(hint, value, f"{path}.")  # type: ignore[arg-type]
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return _convert(option, value, path)
            except ValueError:
                continue
    elif origin is Literal and value in arguments:
        return value
    elif origin is tuple and isinstance(value, list | tuple):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) == len(value):
            return tuple(_convert(kind, item, path) for kind, item in zip(kinds, value, strict=True))
    elif origin is dict and isinstance(value, dict):
        # JSON has one kind of number; a whole one stays an int, which is a float's equal.
        return {
            key: item if isinstance(item, int) else _convert(arguments[1], item, path) for key, item in value.items()
        }
    elif hint is type(None) and value is None:
        return value
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if abs(value) <= sys.float_info.max:  # which NaN is not either
            return float(value)
    elif isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ValueError(f"{path} must be {_readable(hint)}, got {value!r}")


def _readable(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


__all__ = [
    "AttentionConfig",
    "DecoderConfig",
    "OptimizerConfig",
    "RunConfig",
    "check",
    "check_training",
    "edited",
    "fingerprint",
    "from_json",
    "read_fields",
    "to_json",
]
