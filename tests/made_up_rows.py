"""Result rows of runs that never were, for the tests of what is made from rows."""

from typing import Any

from longspan.evaluate.ladder import identity
from longspan.paper.names import config_named, parse_name
from longspan.results import Row

MADE = {"commit": "abc", "command": "longspan made-up", "device": "none", "torch": "0", "python": "0"}


def known(recipe: str, seed: int) -> Row:
    name = parse_name(recipe)
    assert name is not None
    return identity(config_named(name, seed))


def result(recipe: str, seed: int, length: int, value: float, purpose: str = "test", **more: Any) -> Row:
    """A measurement of `value` percent."""
    numbers = {"value": value, "low": max(0.0, value - 2), "high": min(100.0, value + 2), "token_accuracy": value}
    row = {**known(recipe, seed), "step": 20_000, "purpose": purpose, "length": length, "samples": 1000}
    return {**row, **numbers, "time": "2026-01-01T00:00:00Z", **MADE, **more}


def run(recipe: str, seed: int, **more: Any) -> Row:
    """A run that went well."""
    row = {"event": "run", **known(recipe, seed), "edits": [], "steps": 20_000, "step": 20_000, "ending": "finished"}
    row |= {"seconds": 120.0, "gpu_seconds": 60.0, "escape_step": 1500, "loss": 0.01, "token_accuracy": 0.99}
    return {**row, "time": "2026-01-01T00:00:00Z", **MADE, **more}


def whole(recipe: str, seed: int, validation: dict[int, float], test: dict[int, float], **more: Any) -> list[Row]:
    """A run with everything that was measured of it."""
    rows = [run(recipe, seed, **more)]
    rows += [result(recipe, seed, length, value, "validation") for length, value in validation.items()]
    return rows + [result(recipe, seed, length, value) for length, value in test.items()]
