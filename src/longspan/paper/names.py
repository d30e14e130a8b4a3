"""The name of a recipe taken apart: `longspan/copy/nape/softmax/smoke+optimizer.learning_rate=0.001+steps=500`."""

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from longspan.train.config import RunConfig

RATES = ("optimizer.learning_rate", "optimizer.muon_learning_rate")  # what a grid is over
# And what any method may have of our recipe: norms and noise on queries and keys, other slopes.
SETTINGS = tuple(
    f"model.attention.{field}"
    for field in ("qk_norm", "qk_gain", "qk_noise", "qk_noise_on", "qk_noise_layers", "slopes", "slope_factor")
)
_WATCHING = ("name", "log_every", "save_every", "validate_", "test_")  # fields that change nothing about the training
_EDIT = re.compile(r"\+(?=[a-z_]+(?:\.[a-z_]+)*=)")  # not the plus of 1e+3


class RecipeName(NamedTuple):
    """Who wrote the recipe, for which cell of the paper's tables, and what was changed."""

    author: str
    task: str
    position: str
    method: str
    size: str = ""  # "smoke", or nothing
    edits: tuple[str, ...] = ()

    @property
    def base(self) -> str:
        """The name that a recipe is registered under."""
        return "/".join(self[:4])

    @property
    def rates(self) -> tuple[str, ...]:
        """The edits of learning rates."""
        return tuple(edit for edit in self.edits if field_of(edit) in RATES)

    @property
    def settings(self) -> tuple[str, ...]:
        """The edits of settings that are chosen like rates; the paper's recipe has none, what is changed is another."""
        return tuple(edit for edit in self.edits if self.author == "longspan" and field_of(edit) in SETTINGS)

    @property
    def family(self) -> str:
        """Author, size and what else was changed about the training: what a choice is made within."""
        chosen = self.rates + self.settings
        others = [edit for edit in self.edits if edit not in chosen and not field_of(edit).startswith(_WATCHING)]
        return "+".join(["/".join(filter(None, (self.author, self.size))), *others])

    def __str__(self) -> str:
        return "+".join(["/".join(filter(None, (self.base, self.size))), *self.edits])


def field_of(edit: str) -> str:
    """The field of an edit `field=value`."""
    return edit.partition("=")[0]


def parse_name(name: str) -> RecipeName | None:
    """The parts of a recipe's name; None for a run that was named freely."""
    whole, *edits = _EDIT.split(name)
    parts = whole.split("/")
    if not 4 <= len(parts) <= 5 or not all(parts):
        return None
    author, task, position, method, *size = parts
    return RecipeName(author, task, position, method, "".join(size), tuple(map(_without_spaces, edits)))


def _without_spaces(edit: str) -> str:
    """An edit whose value is JSON with spaces, such as `[6, 12]`, as one word, which a plan needs; others stay."""
    field, _, value = edit.partition("=")
    if " " not in value:
        return edit
    try:
        return f"{field}={json.dumps(json.loads(value), separators=(',', ':'))}"
    except json.JSONDecodeError:
        return edit


def config_named(name: RecipeName, seed: int = 0) -> "RunConfig":
    """The config that a recipe's name stands for."""
    from longspan.paper import recipes
    from longspan.train.config import edited

    if name.size not in ("", "smoke"):
        raise ValueError(f"there is no size {name.size!r} of a recipe; there is smoke")
    config = recipes.recipe(name.base)
    config = replace(recipes.smoke(config) if name.size else config, seed=seed)
    for edit in map(_without_spaces, name.edits):
        path, _, value = edit.partition("=")
        config = edited(config, path, value)
        config = replace(config, name=f"{config.name}+{edit}")
    return config
