"""A soft start: smaller alphas in the first steps, and whatever follows as if there had been none."""

from pathlib import Path

import pytest
import torch
from tiny_runs import log_of, tiny, train

from longspan.evaluate.ladder import Measurement
from longspan.nn.normalizers import Entmax
from longspan.train import loop
from longspan.train.checkpoint import load, saved
from longspan.train.config import RunConfig, check
from longspan.train.softening import alpha_at
from longspan.train.trainer import Trainer, model_of

SOFT = tiny(first_alphas=[[4, 1.0], [8, 1.25]])


def losses(config: RunConfig, steps: int) -> list[float]:
    trainer, found = Trainer(config), []
    for _ in range(steps):
        trainer.advance()
        found.append(trainer.metrics().loss)
    return found


def test_the_steps_have_the_alphas_they_are_given() -> None:
    assert [alpha_at(SOFT, step) for step in (0, 3, 4, 7, 8, 100)] == [1, 1, 1.25, 1.25, 1.5, 1.5]
    soft, softmax, own = losses(SOFT, 10), losses(tiny(model__attention__alpha=1.0), 10), losses(tiny(), 10)
    assert soft[:4] == softmax[:4]
    assert soft[4] != softmax[4]
    assert soft[0] != own[0]
    # From one's own alpha the whole time on, nothing is changed.
    assert losses(tiny(first_alphas=[[4, 1.5]]), 10) == own


def test_a_run_goes_on_with_the_alpha_of_its_step() -> None:
    whole, first, second = Trainer(SOFT), Trainer(SOFT), Trainer(SOFT)
    for _ in range(10):
        whole.advance()
    for _ in range(6):
        first.advance()
    second.restore(first.checkpoint())
    for _ in range(4):
        second.advance()
    assert all(map(torch.equal, whole.model.parameters(), second.model.parameters()))


def test_a_checkpoint_is_measured_with_the_alpha_that_made_it(tmp_path: Path) -> None:
    train(tiny(first_alphas=[[10, 1.0], [20, 1.25]], save_every=10), tmp_path)
    found = {}
    for path in saved(tmp_path / "checkpoints"):
        checkpoint = load(path)
        model, _ = model_of(checkpoint)
        found[checkpoint.step] = {part.fixed for part in model.modules() if isinstance(part, Entmax)}
    assert found[20] == {1.25}
    assert found[30] == {1.5}
    assert log_of(tmp_path, "finished")


def test_the_best_is_a_model_of_the_runs_own_alpha(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worse = iter(range(100, 0, -1))
    score = Measurement("exact_match", 0.0, 0, 100, 0, 8, 0)
    monkeypatch.setattr(loop, "measure", lambda *_, **__: score._replace(value=next(worse)))
    train(tiny(first_alphas=[[14, 1.0]]), tmp_path)
    kept = {row["step"]: row["best"] for row in log_of(tmp_path, "validate")}
    assert kept == {7: False, 14: False, 21: True, 28: False, 30: False}
    assert [load(path).step for path in saved(tmp_path / "best")] == [21]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_alphas": [[4, 1.0], [4, 1.2]]}, "one after the other"),
        ({"first_alphas": [[0, 1.0]]}, "one after the other"),
        ({"first_alphas": [[4, 0.5]]}, "between 1 and 64"),
        ({"first_alphas": [[4, 1.0]], "model__attention__method": "softmax"}, "entmax"),
        ({"first_alphas": [[4, 1.0]], "model__attention__alpha": "learned"}, "entmax"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(tiny(**changes))
