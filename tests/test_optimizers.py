"""AdamW against torch's, Muon against its definition."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from longspan.nn.decoder import AttentionConfig, Decoder, DecoderConfig
from longspan.train.config import OptimizerConfig, RunConfig
from longspan.train.optimizers import Optimizer, is_hidden_matrix, orthogonalized
from longspan.train.trainer import learning_rate

CONFIG = DecoderConfig(7, layers=2, dim=12, hidden=20, heads=2, attention=AttentionConfig(qk_norm=True))


def decoder(dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(0)
    return Decoder(CONFIG).to(dtype)


def gradients(model: nn.Module, seed: int, size: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1], ids=["plain", "decay"])
@pytest.mark.parametrize("clip", [None, 0.5], ids=["free", "clipped"])
def test_adamw_is_torchs(dtype: torch.dtype, weight_decay: float, clip: float | None) -> None:
    ours, theirs = decoder(dtype), decoder(dtype)
    config = OptimizerConfig(learning_rate=0.02, betas=(0.85, 0.97), weight_decay=weight_decay, clip=clip)
    optimizer = Optimizer(ours, config)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.0, betas=(0.85, 0.97), weight_decay=weight_decay)
    for step in range(20):
        rate = (step + 1) / 20
        optimizer.rate.fill_(rate)
        reference.param_groups[0]["lr"] = 0.02 * rate
        drawn = gradients(ours, step, size=10.0 ** (step % 5 - 4))
        for name, parameter in theirs.named_parameters():
            parameter.grad = drawn[name].clone()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip or math.inf)
        torch.testing.assert_close(optimizer.step(drawn), norm)
        reference.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        # Ours keeps the rate in float32, whatever the weights are.
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def _with_values(rows: int, columns: int, values: Tensor) -> Tensor:
    left = torch.linalg.qr(torch.randn(rows, rows)).Q[:, : len(values)]
    right = torch.linalg.qr(torch.randn(columns, columns)).Q[:, : len(values)]
    return left * values @ right.T


MATRICES: dict[str, Callable[[], Tensor]] = {
    "square": lambda: torch.randn(32, 32),
    "tall": lambda: torch.randn(64, 24),
    "wide": lambda: torch.randn(24, 64),
    "tiny": lambda: 1e-6 * torch.randn(16, 48),
    "huge": lambda: 1e6 * torch.randn(16, 48),
    "spread": lambda: _with_values(16, 24, torch.logspace(0, -2, 16)),
}


@pytest.mark.parametrize("case", MATRICES)
def test_orthogonalized_has_singular_values_near_one_and_the_same_directions(case: str) -> None:
    torch.manual_seed(0)
    matrix = MATRICES[case]()
    found = orthogonalized(matrix[None])[0]
    assert found.shape == matrix.shape
    values = torch.linalg.svdvals(found)
    # A random square matrix has singular values near 0, which five steps do not bring up to 0.6.
    low = 0.2 if case == "square" else 0.6
    assert low < float(values.min()) <= float(values.max()) < 1.3
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    inside = u.T @ found.double() @ v.T
    off = inside - inside.diagonal().diag()
    assert float(off.abs().max()) < 1e-2


@pytest.mark.parametrize("shape", [(20, 12), (12, 20), (12, 12)], ids=str)
def test_a_stack_is_orthogonalized_one_by_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    stack = torch.randn(5, *shape) * torch.logspace(-3, 3, 5)[:, None, None]
    alone = torch.cat([orthogonalized(matrix[None]) for matrix in stack])
    torch.testing.assert_close(orthogonalized(stack), alone, rtol=1e-4, atol=1e-5)


def test_a_zero_gradient_moves_nothing() -> None:
    assert not orthogonalized(torch.zeros(2, 4, 6)).any()


def test_muon_moves_the_hidden_matrices_alone() -> None:
    model = decoder()
    optimizer = Optimizer(model, OptimizerConfig("muon"))
    by_muon = {name for names in optimizer.muon_groups.values() for name in names}
    matrices = ("attention.query", "attention.key", "attention.value", "attention.output", "gate", "up", "down")
    assert by_muon == {f"blocks.{layer}.{name}.weight" for layer in range(2) for name in matrices}
    assert set(optimizer.adam_names) == {name for name, _ in model.named_parameters()} - by_muon
    assert {"embed.weight", "output.weight", "norm.weight"} <= set(optimizer.adam_names)
    assert any("scaler.beta.weight" in name for name in optimizer.adam_names)
    assert [tuple(shape) for shape in optimizer.muon_groups] == [(12, 12), (20, 12), (12, 20)]
    assert not is_hidden_matrix("embed.weight", model.embed.weight)


def test_adamw_has_no_muon_groups() -> None:
    optimizer = Optimizer(decoder(), OptimizerConfig("adamw"))
    assert not optimizer.muon_groups
    assert set(optimizer.state()) == {
        "count",
        *(f"{moment}.{name}" for moment in ("first", "second") for name in optimizer.parameters),
    }


@pytest.mark.parametrize("weight_decay", [0.0, 0.1], ids=["plain", "decay"])
def test_muon_is_its_definition_and_the_rest_is_adamw(weight_decay: float) -> None:
    ours, theirs = decoder(), decoder()
    config = OptimizerConfig(
        "muon", learning_rate=0.01, muon_learning_rate=0.03, momentum=0.9, weight_decay=weight_decay, clip=None
    )
    optimizer, adamw = Optimizer(ours, config), Optimizer(theirs, OptimizerConfig(**{**vars(config), "name": "adamw"}))
    hidden = {name: parameter.detach().clone() for name, parameter in ours.named_parameters() if _hidden(name)}
    momentum = {name: torch.zeros_like(matrix) for name, matrix in hidden.items()}
    for step in range(5):
        drawn = gradients(ours, step)
        for name, matrix in hidden.items():
            momentum[name] = 0.9 * momentum[name] + 0.1 * drawn[name]
            ahead = orthogonalized((0.9 * momentum[name] + 0.1 * drawn[name])[None])[0]
            rows, columns = matrix.shape
            size = 0.03 * 0.5 * math.sqrt(max(1, rows / columns))
            hidden[name] = matrix * (1 - 0.03 * 0.5 * weight_decay) - size * ahead
        for moved in (optimizer, adamw):
            moved.rate.fill_(0.5)
            moved.step({name: gradient.clone() for name, gradient in drawn.items()})
    for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), hidden.get(name, other.detach()), rtol=1e-4, atol=1e-5)


def _hidden(name: str) -> bool:
    return is_hidden_matrix(name, dict(decoder().named_parameters())[name])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_clipping_shortens_a_long_gradient_and_leaves_a_short_one(name: str) -> None:
    for size, clipped in ((1e-3, False), (1e3, True)):
        model = decoder()
        # Of AdamW's moments the first step shows the gradient itself, times 1 - beta.
        optimizer = Optimizer(model, OptimizerConfig(name, clip=1.0, betas=(0.0, 0.99)))  # type: ignore[arg-type]
        drawn = gradients(model, 0, size)
        whole = torch.cat([gradient.flatten() for gradient in drawn.values()]).norm()
        before = {key: gradient.clone() for key, gradient in drawn.items()}
        torch.testing.assert_close(optimizer.step(drawn), whole)
        scale = 1 / whole if clipped else torch.ones(())
        for key, first in optimizer.first.items():
            torch.testing.assert_close(first, before[key] * scale, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_state_carries_on(name: str) -> None:
    config = OptimizerConfig(name, learning_rate=0.01)  # type: ignore[arg-type]
    straight = decoder()
    optimizer = Optimizer(straight, config)
    for step in range(3):
        optimizer.step(gradients(straight, step))
    resumed = decoder()
    resumed.load_state_dict(straight.state_dict())
    other = Optimizer(resumed, config)
    other.load({key: tensor.clone() for key, tensor in optimizer.state().items()})
    for step in range(3, 6):
        optimizer.step(gradients(straight, step))
        other.step(gradients(resumed, step))
    for mine, theirs in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for key, tensor in optimizer.state().items():
        assert torch.equal(tensor, other.state()[key]), key


def test_the_rate_warms_up_and_falls_as_a_cosine() -> None:
    config = RunConfig("copy", CONFIG, steps=100, optimizer=OptimizerConfig(warmup=10))
    rates = [learning_rate(step, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == pytest.approx(0.5 * (1 + math.cos(0.09 * math.pi)))
    assert rates[50] == pytest.approx(0.5)
    assert 0 < rates[99] < 1e-3
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert learning_rate(0, RunConfig("copy", CONFIG, optimizer=OptimizerConfig(warmup=0))) == 1
