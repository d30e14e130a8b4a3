"""The step over flat memory against the optimiser's own, tensor by tensor."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.nn.decoder import AttentionConfig, Decoder, DecoderConfig
from longspan.train.config import OptimizerConfig
from longspan.train.copies import LowCopies
from longspan.train.flat import FlatStep, joined, rooms, stacked
from longspan.train.optimizers import Optimizer

pytest.importorskip("triton")

from longspan.kernels.adam import BLOCK, adam_step

# Sizes that no block or alignment likes, and a shape that two kinds of matrices share.
MODEL = DecoderConfig(7, layers=2, dim=12, hidden=20, heads=2, attention=AttentionConfig(qk_norm=True))
DECAY = 0.9
QUERY = "blocks.0.attention.query.weight"


class Run:
    """A model with its optimiser, copies and averages."""

    def __init__(self, config: OptimizerConfig, averaged: bool, device: torch.device):
        torch.manual_seed(0)
        self.model = Decoder(MODEL).to(device)
        self.copies = LowCopies(self.model)
        self.optimizer = Optimizer(self.model, config)
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()} if averaged else {}

    def gradients(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        size = 10.0 ** (seed % 3 - 2)
        return {
            name: (size * torch.randn(p.shape, generator=generator)).to(p.device, p.dtype)
            for name, p in self.copies.model.named_parameters()
        }

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a step moves."""
        found = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        found |= {f"copy.{name}": p.detach() for name, p in self.copies.model.named_parameters()}
        found |= {f"average.{name}": tensor for name, tensor in self.average.items()}
        return found | self.optimizer.state()


OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "muon": {"name": "muon"},
    "decay": {"name": "muon", "weight_decay": 0.1},
    "free": {"name": "adamw", "clip": None, "weight_decay": 0.1, "betas": (0.85, 0.97)},
    "without_momentum": {"name": "adamw", "betas": (0.0, 0.97)},
}


@pytest.mark.parametrize("averaged", [False, True], ids=["live", "averaged"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_moves_everything_as_the_optimizer_does(options: dict[str, Any], averaged: bool, device: torch.device) -> None:
    config = replace(OptimizerConfig(learning_rate=0.02, muon_learning_rate=0.03, warmup=1), **options)
    ours, theirs = Run(config, averaged, device), Run(config, averaged, device)
    step = FlatStep(ours.optimizer, ours.copies, ours.average, DECAY if averaged else None)
    for number in range(6):
        for run in (ours, theirs):
            run.optimizer.rate.fill_((number + 1) / 6)
        norm = step.take(ours.gradients(number))
        expected = theirs.optimizer.step(theirs.copies.full(theirs.gradients(number)))
        theirs.copies.refresh()
        if averaged:
            with torch.no_grad():
                torch._foreach_lerp_(list(theirs.average.values()), list(theirs.model.parameters()), 1 - DECAY)
        torch.testing.assert_close(norm, expected)
    found, wanted = ours.tensors(), theirs.tensors()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        low = tensor.dtype == torch.bfloat16
        muon = options["name"] == "muon" and device.type == "cuda"  # whose products are in bfloat16 there
        relative, absolute = (1e-2, 1e-3) if low or muon else (2e-5, 2e-6)
        assert torch.allclose(found[name], tensor, relative, absolute), name
        assert found[name].abs().sum() > 0


def test_tensors_stay_those_that_others_hold(device: torch.device) -> None:
    run = Run(OptimizerConfig(name="muon"), True, device)
    before, held = copy.deepcopy(run.tensors()), run.tensors()
    weight = run.model.get_parameter(QUERY)
    FlatStep(run.optimizer, run.copies, run.average, DECAY)
    for name, tensor in run.tensors().items():
        assert torch.equal(tensor, before[name])
        assert tensor.shape == held[name].shape
    assert run.model.get_parameter(QUERY) is weight
    # What is no copy is the model's own: one moves with the other.
    assert run.copies.model.norm.weight is run.model.norm.weight


def test_a_saved_state_is_taken_up_again(device: torch.device) -> None:
    config = OptimizerConfig(name="muon", warmup=1)
    runs = [Run(config, True, device) for _ in range(2)]
    steps = [FlatStep(run.optimizer, run.copies, run.average, DECAY) for run in runs]
    for number in range(3):
        steps[0].take(runs[0].gradients(number))
    saved = {name: tensor.clone() for name, tensor in runs[0].tensors().items()}
    with torch.no_grad():
        for name, tensor in runs[1].tensors().items():
            tensor.copy_(saved[name])
    for run, step in zip(runs, steps, strict=True):
        step.take(run.gradients(7))
    theirs = runs[1].tensors()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in runs[0].tensors().items())


def test_many_steps_are_torchs_adamw(device: torch.device) -> None:
    """Long enough that a bias correction near 1, and one near 0, would show."""
    torch.manual_seed(0)
    reference = torch.nn.Parameter(torch.randn(3 * BLOCK + 100, device=device, dtype=torch.float64))
    weights = reference.detach().float()
    copies = weights[: 2 * BLOCK].bfloat16()
    moments = torch.zeros_like(weights), torch.zeros_like(weights)
    count, rate = torch.zeros((), device=device), torch.full((), 0.5, device=device)
    optimizer = torch.optim.AdamW([reference], lr=0.005, betas=(0.9, 0.9999), weight_decay=0.1)
    for _ in range(30):
        gradient = torch.randn_like(weights).bfloat16()
        reference.grad = gradient.double()
        norm, shrink = adam_step(
            weights, copies, None, moments, gradient[: 2 * BLOCK], gradient[2 * BLOCK :].float(), count, rate,
            learning_rate=0.01, betas=(0.9, 0.9999), weight_decay=0.1, clip=None, share=1.0,
        )  # fmt: skip
        optimizer.step()
        torch.testing.assert_close(norm.double(), gradient.double().norm())
        assert shrink == 1
    assert count == 30
    torch.testing.assert_close(weights.double(), reference.detach(), rtol=1e-5, atol=1e-6)
    rounded = weights[: 2 * BLOCK]
    if device.type == "cpu":  # the interpreter cuts digits off instead of rounding
        rounded = (rounded.view(torch.int32) & -65536).view(torch.float32)
    assert torch.equal(copies, rounded.bfloat16())


def test_gradients_that_do_not_fit_are_refused(device: torch.device) -> None:
    weights = torch.zeros(2 * BLOCK, device=device)
    scalar = torch.zeros((), device=device)
    for low, full in ((BLOCK - 1, BLOCK), (BLOCK, BLOCK - 1)):
        with pytest.raises(ValueError, match="gradients"):
            adam_step(
                weights, weights[:BLOCK].bfloat16(), None, (weights, weights), weights[:low], weights[:full], scalar,
                scalar, learning_rate=0.1, betas=(0.9, 0.99), weight_decay=0.0, clip=None, share=1.0,
            )  # fmt: skip


def test_memory_is_aligned_and_in_whole_blocks() -> None:
    assert rooms([]) == []
    assert rooms([1]) == [BLOCK]
    taken = rooms([100, 64, 5])
    assert taken[:2] == [128, 64]
    assert sum(taken) == BLOCK
    tensors = [torch.randn(3, 5), torch.randn(7)]
    values = [tensor.clone() for tensor in tensors]
    flat = joined([tensors])
    flat += 1
    assert all(torch.equal(tensor, value + 1) for tensor, value in zip(tensors, values, strict=True))
    stack = stacked(tensors[:1] * 1)
    stack.zero_()
    assert tensors[0].abs().sum() == 0
