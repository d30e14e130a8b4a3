"""Synthetic tasks, one file each, sampled on the fly on any device.

Every task of this folder for the decoder is found by its class: a new file needs no entry anywhere.
"""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
from typing import Any

from longspan.tasks.base import Batch, Task, stream_seed

__all__ = ["Batch", "Task", "all_tasks", "get_task", "stream_seed", "task_names"]


@functools.cache
def _classes() -> dict[str, type[Task]]:
    """By name, every class of the folder that is a whole task: nothing abstract, and named."""
    found: dict[str, type[Task]] = {}
    for file in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{file.name}")
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if not issubclass(kind, Task) or kind.__module__ != module.__name__ or inspect.isabstract(kind):
                continue
            if (name := getattr(kind, "name", None)) is None:
                continue
            if name in found:
                raise ValueError(f"two tasks are called {name!r}: {found[name].__module__} and {kind.__module__}")
            found[name] = kind
    return dict(sorted(found.items()))


def task_names() -> list[str]:
    """Names that `get_task` knows."""
    return list(_classes())


def get_task(name: str, **fields: Any) -> Task:
    """A task by name; `fields` change its parameters from the paper's."""
    if name not in _classes():
        raise ValueError(f"unknown task {name!r}; there are {', '.join(task_names())}")
    kind = _classes()[name]
    known = {field.name: field.type for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := fields.keys() - known.keys():
        raise ValueError(f"{name} has no field {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    for field, value in fields.items():
        if known[field] is int and not isinstance(value, int):
            raise ValueError(f"{name}: {field} must be int, got {value!r}")
    return kind(**fields)


def all_tasks() -> list[Task]:
    """Every task with the paper's parameters."""
    return [get_task(name) for name in task_names()]
