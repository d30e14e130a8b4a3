"""What changes in the course of a run: slopes that grow, noise once the task is learned."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_runs import TINY, tiny
from torch import Tensor

from longspan.nn.norm import HeadNorm
from longspan.nn.positions import Position
from longspan.train.checkpoint import Checkpoint
from longspan.train.config import RunConfig, to_json
from longspan.train.trainer import Trainer


def test_noise_depends_on_the_seed_and_the_step_alone() -> None:
    attention = replace(TINY.model.attention, qk_norm=True, qk_noise=0.5)
    config = tiny(model=replace(TINY.model, attention=attention), noise_from=0.0)
    whole, first, second = Trainer(config), Trainer(config), Trainer(config)
    for _ in range(4):
        whole.advance()
    for _ in range(2):
        first.advance()
    second.restore(first.checkpoint())
    torch.manual_seed(99)
    for _ in range(2):
        second.advance()
    assert all(map(torch.equal, whole.model.parameters(), second.model.parameters()))
    quiet = Trainer(tiny(model=replace(config.model, attention=replace(attention, qk_noise=0.0)), noise_from=0.0))
    noisy = Trainer(config)
    for trainer in (quiet, noisy):
        trainer.advance()
    assert quiet.metrics().loss != pytest.approx(noisy.metrics().loss)


def test_noise_waits_until_the_task_is_learned() -> None:
    attention = replace(TINY.model.attention, qk_norm=True, qk_noise=0.5)
    noisy = Trainer(tiny(model=replace(TINY.model, attention=attention), noise_from=0.02, steps=60))
    quiet = Trainer(tiny(model=replace(TINY.model, attention=replace(attention, qk_noise=0.0)), steps=60))
    gates, equal = [], []
    while noisy.step < 60:
        gates.append(float(noisy.phases.state()["gate"]))
        for trainer in (noisy, quiet):
            trainer.advance()
        equal.append(noisy.metrics().loss == quiet.metrics().loss)
    assert gates == sorted(gates)
    opened = gates.index(1.0)
    assert 0 < opened < 50
    assert all(equal[:opened])
    assert not any(equal[opened:])
    again = Trainer(noisy.config)
    again.restore(noisy.checkpoint())
    gate = again.phases.state()["gate"]
    assert float(gate) == 1
    assert all(module.gate is gate for module in again.model.modules() if isinstance(module, HeadNorm))


def growing(steps: int = 8, noise: float = 0.0, **changes: Any) -> RunConfig:
    attention = replace(TINY.model.attention, method="asentmax", position="nape", qk_norm=True, qk_noise=noise)
    return tiny(
        model=replace(TINY.model, attention=attention), slope_start=0.1, slope_steps=steps, noise_from=0.0, **changes
    )


def slopes_of(trainer: Trainer) -> list[Tensor]:
    found = [module.slopes for module in trainer.model.modules() if isinstance(module, Position)]
    return [slopes.clone() for slopes in found if slopes is not None]


def test_slopes_grow_by_equal_ratios_to_their_own() -> None:
    trainer = Trainer(growing(steps=8))
    own = slopes_of(trainer)
    factors = []
    for _ in range(10):
        trainer.advance()
        now = slopes_of(trainer)
        factors.append(float(now[0].max() / own[0].max()))
        assert all(torch.allclose(new, factors[-1] * old) for new, old in zip(now, own, strict=True))
    assert factors == pytest.approx([0.1 ** (1 - step / 8) for step in range(8)] + [1, 1])
    assert all(map(torch.equal, slopes_of(trainer), own))


def test_gentle_slopes_are_those_of_a_smaller_factor() -> None:
    """The first step is that of a model whose own slopes are as gentle."""
    grows = Trainer(growing())
    attention = replace(grows.config.model.attention, slope_factor=0.1)
    gentle = Trainer(
        replace(grows.config, slope_start=1.0, slope_steps=0, model=replace(grows.config.model, attention=attention))
    )
    for trainer in (grows, gentle):
        trainer.advance()
    assert grows.metrics().loss == pytest.approx(gentle.metrics().loss, rel=1e-6)


def test_a_run_resumes_while_slopes_grow_and_after() -> None:
    config = growing(steps=4, noise=0.5)
    whole, saved = Trainer(config), {}
    while whole.step < 8:
        if whole.step in (2, 4, 6):
            saved[whole.step] = {name: tensor.clone() for name, tensor in whole.checkpoint().tensors.items()}
        whole.advance()
    for step, tensors in saved.items():
        again = Trainer(config)
        again.restore(Checkpoint(step, to_json(config), tensors))
        while again.step < whole.step:
            again.advance()
        assert all(map(torch.equal, whole.model.parameters(), again.model.parameters()))


def test_noise_waits_for_slopes() -> None:
    trainer = Trainer(growing(steps=4, noise=0.5))
    gates = []
    for _ in range(7):
        trainer.advance()
        gates.append(float(trainer.phases.state()["gate"]))
    assert gates == [0, 0, 0, 0, 1, 1, 1]


def test_slopes_that_are_not_there_cannot_grow() -> None:
    config = growing()
    attention = replace(config.model.attention, position="nope")
    with pytest.raises(ValueError, match="slope_steps is for ALiBi and NAPE: nope has no slopes"):
        Trainer(replace(config, model=replace(config.model, attention=attention)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slope_start": 0.0}, "slope_start must be positive"),
        ({"slope_steps": -1}, "slope_steps not negative"),
        ({"slope_steps": 0}, "say by slope_steps"),
    ],
    ids=["start", "steps", "never"],
)
def test_a_growth_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(replace(growing(), **changes))
