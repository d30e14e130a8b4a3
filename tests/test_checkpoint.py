"""Checkpoints: every tensor comes back, and a crash, a full disk or damage never costs the last good one."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longspan.train import checkpoint as checkpoints
from longspan.train.checkpoint import PART_BYTES, Checkpoint, CheckpointError, load, of_run, save, saved, step_of

ODD: dict[str, Callable[[], Tensor]] = {
    "0-d": lambda: torch.tensor(3.5),
    "0-d-int": lambda: torch.tensor(2**40 + 1),
    "empty": lambda: torch.empty(0),
    "empty-matrix": lambda: torch.empty(3, 0, 2),
    "bf16": lambda: torch.randn(5, 7, dtype=torch.bfloat16),
    "int64": lambda: torch.arange(-4, 5),
    "bool": lambda: torch.tensor([True, False]),
    "float64": lambda: torch.randn(2, 2, dtype=torch.float64),
    "not-finite": lambda: torch.tensor([torch.inf, -torch.inf, -0.0, torch.nan]),
    "transposed": lambda: torch.randn(4, 6).T,
    "view": lambda: torch.randn(10, 10)[2:5, ::3],
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
    "two-parts": lambda: torch.randn(PART_BYTES // 4 + 1000, 1),
    "three-parts-bf16": lambda: torch.randn(PART_BYTES + 7).bfloat16(),
}


def small(step: int) -> Checkpoint:
    return Checkpoint(step, {"name": "x"}, {"weight": torch.full((3, 2), float(step)), "count": torch.tensor(step)})


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def test_odd_tensors_come_back_in_parts_of_at_most_15_mb(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {name: make() for name, make in ODD.items()}
    path = save(tmp_path, Checkpoint(12, {"deep": {"list": [1, None]}}, tensors))
    assert path == tmp_path / "step-00000012"
    assert step_of(path) == 12
    sizes = [part.stat().st_size for part in path.glob("part-*")]
    assert len(sizes) >= 4
    assert max(sizes) <= PART_BYTES == 15_000_000
    found = load(path)
    assert (found.step, found.config) == (12, {"deep": {"list": [1, None]}})
    assert list(found.tensors) == list(tensors)
    assert not [name for name in tensors if not same(found.tensors[name], tensors[name])]


def test_many_small_tensors_share_a_part(tmp_path: Path) -> None:
    tensors = {f"{'long.name.' * 20}{number}": torch.full((number % 5,), number) for number in range(500)}
    path = save(tmp_path, Checkpoint(0, {}, tensors))
    assert len(list(path.glob("part-*"))) == 1
    found = load(path).tensors
    assert all(same(tensor, found[name]) for name, tensor in tensors.items())


def test_no_tensors_at_all(tmp_path: Path) -> None:
    assert load(save(tmp_path, Checkpoint(0, {}, {}))).tensors == {}


def test_the_newest_two_stay(tmp_path: Path) -> None:
    for step in (5, 10, 1000):
        save(tmp_path, small(step))
    assert [step_of(path) for path in saved(tmp_path)] == [10, 1000]
    save(tmp_path, small(2000), keep=1)
    assert [step_of(path) for path in saved(tmp_path)] == [2000]


def test_the_same_step_again_takes_the_place(tmp_path: Path) -> None:
    save(tmp_path, small(7))
    again = Checkpoint(7, {"name": "x"}, {"weight": torch.zeros(2)})
    assert torch.equal(load(save(tmp_path, again)).tensors["weight"], torch.zeros(2))
    assert len(saved(tmp_path)) == 1


def test_a_kill_while_a_step_is_saved_again_leaves_no_half_of_it_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, small(6))
    save(tmp_path, small(7))
    remove = shutil.rmtree

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if path.name != "draft" and path.exists():
            (path / "index.json").unlink()
            raise KeyboardInterrupt
        remove(path, ignore_errors=ignore_errors)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, small(7))
    assert [load(path).step for path in saved(tmp_path)] == [6, 7]
    save(tmp_path, small(8))
    assert sorted(os.listdir(tmp_path)) == ["step-00000007", "step-00000008"]


def full_disk_after(monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    left = iter(range(writes))

    def fsync(_: int) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("writes", [0, 1, 2, 3], ids=["first-part", "second-part", "config", "index"])
def test_a_full_disk_is_told_and_the_last_good_one_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    monkeypatch.setattr(checkpoints, "PART_BYTES", 6000)
    good = save(tmp_path, small(1))
    full_disk_after(monkeypatch, writes)
    large = Checkpoint(2, {}, {"weight": torch.randn(2000)})
    with pytest.raises(CheckpointError, match=f"could not write .*No space left.* The last good one is {good}"):
        save(tmp_path, large)
    assert os.listdir(tmp_path) == [good.name]
    assert same(load(good).tensors["weight"], small(1).tensors["weight"])
    monkeypatch.undo()
    assert saved(tmp_path) == [good]
    assert same(load(save(tmp_path, large)).tensors["weight"], large.tensors["weight"])


def test_a_full_disk_at_the_first_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk_after(monkeypatch, 0)
    with pytest.raises(CheckpointError, match="There is no earlier one"):
        save(tmp_path, small(1))
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="could not write"):
        save(tmp_path / "file" / "checkpoints", small(1))


def test_what_a_kill_left_behind_is_not_a_checkpoint_and_goes_with_the_next(tmp_path: Path) -> None:
    good = save(tmp_path, small(1))
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "part-0000.safetensors").write_bytes(b"half")
    assert saved(tmp_path) == [good]
    save(tmp_path, small(2))
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def _without(lost: str) -> Callable[[Path], object]:
    def drop(path: Path) -> None:
        path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != lost}))

    return drop


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "flipped-bit": ("part-0000.safetensors", _flip, "part-0000.safetensors is damaged: its checksum does not match"),
    "missing-part": ("part-0000.safetensors", Path.unlink, "No such file"),
    "empty-part": ("part-0000.safetensors", lambda path: path.write_bytes(b""), "checksum"),
    "cut-index": ("index.json", lambda path: path.write_bytes(path.read_bytes()[:40]), "cannot be read"),
    "empty-index": ("index.json", lambda path: path.write_text(""), "cannot be read"),
    "another-index": ("index.json", lambda path: path.write_text("[1]"), "cannot be read"),
    "poor-index": ("index.json", _without("tensors"), "cannot be read: 'tensors'"),
    "index-without-step": ("index.json", _without("step"), "cannot be read: 'step'"),
    "missing-index": ("index.json", Path.unlink, "No such file"),
    "cut-config": ("config.json", lambda path: path.write_text('{"a'), "cannot be read"),
    "missing-config": ("config.json", Path.unlink, "No such file"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_told_with_the_way_out(tmp_path: Path, damage: str) -> None:
    file, harm, message = DAMAGE[damage]
    first, second = save(tmp_path, small(1)), save(tmp_path, small(2))
    harm(second / file)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(second)
    assert str(second) in str(caught.value)
    assert f"Delete it to go on from {first}" in str(caught.value)
    assert load(first).step == 1
    harm(first / file)
    with pytest.raises(CheckpointError, match=message):
        load(first)


def test_the_only_one_damaged(tmp_path: Path) -> None:
    path = save(tmp_path, small(1))
    (path / "index.json").unlink()
    with pytest.raises(CheckpointError, match="There is no other one"):
        load(path)


def test_the_best_of_a_run_or_its_last(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        of_run(tmp_path)
    last = save(tmp_path / "checkpoints", small(9))
    assert of_run(tmp_path) == last
    best = save(tmp_path / "best", small(3))
    assert of_run(tmp_path) == best
    assert of_run(tmp_path, "last") == last
