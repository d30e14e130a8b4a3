"""What begins once a task is learned: entmax after a soft start, and noise."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_runs import TINY, tiny

from longspan.nn.norm import HeadNorm
from longspan.nn.normalizers import Entmax
from longspan.train.checkpoint import Checkpoint
from longspan.train.config import RunConfig, to_json
from longspan.train.phases import LOOK_EVERY
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


def soft(until: float, steps: int = 300, noise: float = 0.0, **changes: Any) -> RunConfig:
    attention = replace(TINY.model.attention, method="asentmax", qk_norm=True, qk_noise=noise)
    model = replace(TINY.model, attention=attention)
    return tiny(model=model, soft_until=until, noise_from=0.0, steps=steps, **changes)


def test_a_soft_start_is_softmax_until_the_task_is_learned() -> None:
    """The same numbers as ASSMax, which has the same parameters, up to the look that finds it learned."""
    sparse = Trainer(soft(until=0.01))
    attention = replace(sparse.config.model.attention, method="assmax")
    dense = Trainer(replace(sparse.config, soft_until=None, model=replace(sparse.config.model, attention=attention)))
    while sparse.phases.soft:
        for trainer in (sparse, dense):
            trainer.advance()
        assert sparse.metrics().loss == dense.metrics().loss
    assert sparse.step % LOOK_EVERY == 0
    assert sparse.step < 150
    for trainer in (sparse, dense):
        trainer.advance()
    assert sparse.metrics().loss != dense.metrics().loss


def test_a_soft_start_leaves_entmax_a_quarter_of_the_steps() -> None:
    trainer = Trainer(soft(until=1.0, steps=4 * LOOK_EVERY))
    while trainer.step < 3 * LOOK_EVERY:
        assert trainer.phases.soft
        trainer.advance()
    assert not trainer.phases.soft
    assert not any(module.soft for module in trainer.model.modules() if isinstance(module, Entmax))


def test_a_run_with_a_soft_start_resumes_in_either_phase() -> None:
    config = soft(until=1.0, steps=LOOK_EVERY + 10, noise=0.5)  # entmax from step LOOK_EVERY on
    whole = Trainer(config)
    saved = {}
    while whole.step < LOOK_EVERY + 4:
        if whole.step in (LOOK_EVERY - 2, LOOK_EVERY + 2):
            saved[whole.step] = whole.checkpoint().step, {k: v.clone() for k, v in whole.checkpoint().tensors.items()}
        whole.advance()
    for step, tensors in saved.values():
        again = Trainer(config)
        again.restore(Checkpoint(step, to_json(config), tensors))
        assert again.phases.soft == (step < LOOK_EVERY)
        while again.step < whole.step:
            again.advance()
        assert all(map(torch.equal, whole.model.parameters(), again.model.parameters()))


def test_noise_waits_for_the_end_of_a_soft_start() -> None:
    trainer = Trainer(soft(until=1.0, steps=LOOK_EVERY + 10, noise=0.5))
    while trainer.step < LOOK_EVERY:
        assert float(trainer.phases.state()["gate"]) == 0
        trainer.advance()
    trainer.advance()
    assert float(trainer.phases.state()["gate"]) == 1


@pytest.mark.parametrize("changes", [{"method": "softmax"}, {"alpha": "learned"}], ids=str)
def test_a_soft_start_needs_a_sparse_method_of_fixed_alpha(changes: dict[str, Any]) -> None:
    config = soft(until=0.9)
    attention = replace(config.model.attention, **changes)
    with pytest.raises(ValueError, match="soft_until is for entmax with a fixed alpha"):
        Trainer(replace(config, model=replace(config.model, attention=attention)))


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # by dynamo itself
def test_compiled_code_follows_the_end_of_a_soft_start() -> None:
    trainer = Trainer(soft(until=0.9))
    tokens = trainer.draw(0)[1].tokens
    torch._dynamo.reset()
    compiled = torch.compile(trainer.model, backend="eager")
    for module in trainer.model.modules():
        if isinstance(module, HeadNorm):
            module.weight.data.fill_(5.0)  # far from uniform
    outputs = []
    for softly in (True, False):
        for module in trainer.model.modules():
            if isinstance(module, Entmax):
                module.soft = softly
        outputs.append(compiled(tokens))
        torch.testing.assert_close(outputs[-1], trainer.model(tokens))
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)
