"""Noise on queries and keys, which begins once a task is learned."""

from dataclasses import replace

import pytest
import torch
from tiny_runs import TINY, tiny

from longspan.nn.norm import HeadNorm
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
        gates.append(float(noisy.noise.state()["gate"]))
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
    gate = again.noise.state()["gate"]
    assert float(gate) == 1
    assert all(module.gate is gate for module in again.model.modules() if isinstance(module, HeadNorm))


def test_the_gate_opens_by_a_mean_over_a_hundred_steps_and_stays_open() -> None:
    attention = replace(TINY.model.attention, qk_norm=True, qk_noise=0.5)
    noise = Trainer(tiny(model=replace(TINY.model, attention=attention), noise_from=0.5)).noise
    gate, needed = noise.state()["gate"], 0
    while not gate:
        noise.take(torch.ones(()))
        needed += 1
    assert needed == 69  # 0.99^69 is below a half
    for _ in range(10):
        noise.take(torch.zeros(()))
    assert gate == 1
