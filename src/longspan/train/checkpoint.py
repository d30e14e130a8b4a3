"""Checkpoints: a folder of safetensors files of at most 15 MB and an index, written whole or not at all.

    RUN/checkpoints/step-00002000/config.json
                                  index.json             the step, and where every tensor lies
                                  part-0000.safetensors
                                  part-0001.safetensors ...

A checkpoint is built in a folder with another name and renamed when every byte of it is on disk, so a folder named
``step-...`` is complete. The index holds a checksum of every part.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

PART_BYTES = 15_000_000


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, and what to do about it."""


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a run after `step` steps, and the config that made them."""

    step: int
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def save(folder: Path, checkpoint: Checkpoint, keep: int = 2) -> Path:
    """Write `checkpoint` into `folder` and return its path; only the `keep` newest stay."""
    path = folder / f"step-{checkpoint.step:08d}"  # see step_of
    draft, replaced = folder / "draft", folder / "replaced"  # fixed names: what a kill left behind goes with the next
    try:
        for rest in (draft, replaced):
            shutil.rmtree(rest, ignore_errors=True)
        draft.mkdir(parents=True)
        index = _write_parts(draft, checkpoint.tensors)
        _write(draft / "config.json", json.dumps(checkpoint.config, indent=2).encode())
        _write(draft / "index.json", json.dumps({"step": checkpoint.step, **index}).encode())
        if path.exists():  # the same step again; half deleted it must not keep its name
            path.rename(replaced)
        draft.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(f"could not write {path}: {error}. {_survivor(folder)}") from error
    for old in saved(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def saved(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def of_run(run: Path, which: Literal["best", "last"] = "best") -> Path:
    """The checkpoint of a run that scored best in validation, where there was any, or its last one."""
    found = (which == "best" and saved(run / "best")) or saved(run / "checkpoints")
    if not found:
        raise CheckpointError(f"{run} has no checkpoint")
    return found[-1]


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def load(path: Path) -> Checkpoint:
    """Read a checkpoint, checking every part against its checksum."""
    from safetensors.torch import load as parse

    try:
        config = json.loads((path / "config.json").read_bytes())
        index = json.loads((path / "index.json").read_bytes())
        parts = {}
        for name, checksum in index["parts"].items():
            data = (path / name).read_bytes()
            if _checksum(data) != checksum:
                raise ValueError(f"{name} is damaged: its checksum does not match")
            parts[name] = parse(data)
        tensors = {
            name: torch.cat([parts[part][key] for part, key in pieces]).reshape(shape)
            for name, (shape, pieces) in index["tensors"].items()
        }
        return Checkpoint(index["step"], config, tensors)
    except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {_others(path)}") from error


def _write_parts(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Write the tensors, flattened and cut where needed, into parts; return where each piece lies."""
    from safetensors.torch import save as serialise

    parts: dict[str, str] = {}
    pieces: dict[str, list[tuple[str, str]]] = {name: [] for name in tensors}
    pending: dict[str, Tensor] = {}
    room = PART_BYTES

    def flush() -> None:
        nonlocal pending, room
        if pending:
            data = serialise(pending)
            name = f"part-{len(parts):04d}.safetensors"
            _write(folder / name, data)
            parts[name] = _checksum(data)
        pending, room = {}, PART_BYTES

    header = 256  # bytes of a safetensors header that a piece may take
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        start = 0
        while start < len(flat) or start == 0:
            fits = (room - header - len(name)) // flat.element_size()
            if fits < min(len(flat) - start, 1024):
                flush()
                continue
            piece = flat[start : start + fits].clone()
            key = f"{name}#{start}"
            pending[key] = piece
            pieces[name].append((f"part-{len(parts):04d}.safetensors", key))
            room -= piece.numel() * piece.element_size() + header + len(name)
            start += max(len(piece), 1)
    flush()
    return {"parts": parts, "tensors": {name: (list(tensors[name].shape), found) for name, found in pieces.items()}}


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _survivor(folder: Path) -> str:
    kept = saved(folder)
    return f"The last good one is {kept[-1]}." if kept else "There is no earlier one."


def _others(path: Path) -> str:
    others = [other for other in saved(path.parent) if other != path]
    return f"Delete it to go on from {others[-1]}." if others else "There is no other one."
