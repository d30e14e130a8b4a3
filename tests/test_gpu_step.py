"""The training step as a GPU takes it, with every kernel it has, in Triton's interpreter: its losses are plain ones."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from longspan.nn import gated, residual
from longspan.nn.attention import joint_projection
from longspan.nn.embedding import Embedding, LookUp
from longspan.paper.recipes import recipe
from longspan.train.config import RunConfig
from longspan.train.copies import LowCopies
from longspan.train.flat import FlatStep
from longspan.train.trainer import Trainer

STEPS = 4
HALF = torch.float16  # the interpreter is wrong in bfloat16


def small(name: str) -> RunConfig:
    config = recipe(name)
    sizes = replace(config.model, dim=32, hidden=48, heads=2, layers=2)
    optimizer = replace(config.optimizer, warmup=1)
    return replace(
        config, batch=3, shortest=6, longest=9, steps=100, model=sizes, optimizer=optimizer, precision="float32"
    )


def losses(trainer: Trainer) -> list[float]:
    found = []
    for _ in range(STEPS):
        trainer.advance()
        found.append(trainer.metrics().loss)
    return found


class HalfTrainer(Trainer):
    """A trainer on a CPU with copies in half precision and the flat step."""

    def __init__(self, config: RunConfig):
        super().__init__(config, "cpu")
        self.copies = LowCopies(self.model, HALF)
        self.replica = self.copies.model
        self._flat = FlatStep(self.optimizer, self.copies, self.average, config.average)

    def _loss(self, tokens: Tensor, targets: Tensor, mask: Tensor, last: int) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", HALF):
            return super()._loss(tokens, targets, mask, last)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes this step by itself")
@pytest.mark.parametrize(
    "name", ["paper/2back/nape/softmax", "paper/copy/nape/asentmax", "longspan/reverse/nape/ssmax"]
)
def test_a_step_by_kernels_is_the_plain_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = losses(Trainer(small(name), "cpu"))
    served: list[str] = []

    def by_kernels(*_: Any) -> str:
        served.append("attention")
        return "triton"

    def serves(name: str) -> Any:
        def fused(*_: Any) -> bool:
            served.append(name)
            return torch.is_grad_enabled()

        return fused

    monkeypatch.setattr(importlib.import_module("longspan.functional.attention"), "_choose", by_kernels)
    monkeypatch.setattr(importlib.import_module("longspan.nn.attention"), "projections", joint_projection)
    monkeypatch.setattr(residual, "fused", serves("norms"))
    monkeypatch.setattr(gated, "fused", serves("gates"))
    monkeypatch.setattr(Embedding, "forward", lambda self, tokens: LookUp.apply(tokens, self.weight))
    found = losses(HalfTrainer(small(name)))
    assert found == pytest.approx(plain, rel=1e-3)
    assert abs(plain[-1] - plain[0]) > 3e-3  # it moves, so that a step that does nothing would be seen
    assert {"attention", "norms", "gates"} <= set(served)
