"""Path counts against brute force, gradients against autograd by hand, and what moves a gradient norm."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longspan.functional import entmax
from longspan.nn.decoder import Block, Decoder
from longspan.probes import over_squashing
from longspan.probes.over_squashing import Scale, at_loss, edges, gradients, look, paths_to_last, run_config
from longspan.results import Row
from longspan.tasks import get_task
from longspan.tasks.base import Batch
from longspan.train.trainer import Trainer

TINY = Scale(length=12, symbols=4, dim=16, heads=2, steps=20, batch=4)


def model_and_batch(alpha: float, layers: int = 3) -> tuple[Decoder, Batch]:
    torch.manual_seed(0)
    config = run_config(TINY, alpha, 0).model
    model = Decoder(replace(config, layers=layers)).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query.weight", "key.weight")):
                parameter.mul_(40)  # scores that differ, so that something is sparse
    task = get_task("delayed_copy", num_symbols=TINY.symbols)
    return model, task.sample(3, TINY.length, generator=torch.Generator().manual_seed(1))


def brute_force(graphs: Sequence[Tensor]) -> int:
    """Paths of one sequence to the last token, walked one by one."""
    time = graphs[0].shape[0]
    count = 0
    for stops in itertools.product(range(time), repeat=len(graphs)):
        places = [*stops, time - 1]
        count += all(bool(graph[places[i + 1], places[i]]) for i, graph in enumerate(graphs))
    return count


@pytest.mark.parametrize("density", [0.2, 0.6, 1.0])
def test_paths_are_those_that_one_can_walk(density: float) -> None:
    drawn = torch.rand(3, 2, 6, 6, generator=torch.Generator().manual_seed(0))  # (layers, batch, time, time)
    graphs = ((drawn < density) | torch.eye(6, dtype=torch.bool)).tril()
    counts = paths_to_last(list(graphs))
    for layer, sequence in itertools.product(range(3), range(2)):
        assert counts[layer, sequence] == brute_force(list(graphs[layer:, sequence]))


@pytest.mark.parametrize(("n", "layers"), [(1, 3), (5, 1), (7, 4), (64, 8)])
def test_dense_paths_are_a_binomial(n: int, layers: int) -> None:
    graphs = [torch.ones(1, n, n).tril().bool()] * layers
    assert paths_to_last(graphs)[0].item() == math.comb(n + layers - 1, layers)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_norms_are_those_of_autograd_by_hand(alpha: float) -> None:
    model, batch = model_and_batch(alpha)
    flow = gradients(model, batch)
    norms = torch.zeros(3, dtype=torch.float64)
    for tokens, targets, mask in zip(*batch, strict=True):
        states = [model.embed(tokens[None]) * model.config.dim**0.5]
        for block in model.blocks:
            states.append(block(states[-1], lengths=None, documents=None, cache=None))
        guesses = model.output(model.norm(states[-1]))[0].log_softmax(-1)
        loss = -guesses[mask].gather(1, targets[mask][:, None]).mean()
        norms += torch.stack([part.norm() for part in torch.autograd.grad(loss, states[:3])])
    torch.testing.assert_close(flow.norm, norms / 3)


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_no_path_no_gradient(alpha: float) -> None:
    """The graph is the gradient's: what the last output reads of the first states, and nothing else, has a slope."""
    model, batch = model_and_batch(alpha)
    flow = gradients(model, batch)
    graphs = [layer.graph for layer in edges(model, flow.inputs)]
    x = flow.inputs[0].requires_grad_()
    out = x
    for block in model.blocks:
        out = block(out, lengths=None, documents=None, cache=None)
    direction = torch.randn(out.shape[-1], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (slope,) = torch.autograd.grad((out[:, -1] @ direction).sum(), x)
    reached = torch.zeros(x.shape[:2], dtype=torch.float64)
    reached[:, -1] = 1
    for graph in reversed(graphs):
        reached = torch.einsum("bj,bjk->bk", reached, graph.double())
    assert (reached == 0).any()
    assert ((slope.abs().sum(-1) > 0) == (reached > 0)).all()


def test_a_norm_depends_on_the_size_of_the_states_and_the_function_does_not() -> None:
    model, batch = model_and_batch(1.5)
    before, logits = gradients(model, batch), model(batch.tokens)
    with torch.no_grad():
        model.embed.weight.mul_(6)
        for block in model.blocks:
            assert isinstance(block, Block)
            block.after_attention.weight.mul_(6)
            block.after_mlp.weight.mul_(6)
    after = gradients(model, batch)
    torch.testing.assert_close(model(batch.tokens), logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.norm, before.norm / 6, rtol=1e-3, atol=0)
    torch.testing.assert_close(after.norm * after.state_norm, before.norm * before.state_norm, rtol=1e-3, atol=0)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_the_papers_bound_is_the_same_for_every_attention_once_summed_over_sources(alpha: float) -> None:
    # Its p-bar = p / beta_1 + identity has rows of sum 1 / beta_1 + 1, and so have the products' (1 / beta_1 + 1)^L.
    product, beta = torch.eye(9, dtype=torch.float64), 0.7
    for layer in range(4):
        scores = 3 * torch.randn(9, 9, generator=torch.Generator().manual_seed(layer), dtype=torch.float64)
        weights = entmax(scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf), alpha)
        product = (weights / beta + torch.eye(9, dtype=torch.float64)) @ product
    assert product.sum(1).tolist() == pytest.approx([(1 / beta + 1) ** 4] * 9)


def test_softmax_reads_everything() -> None:
    model, batch = model_and_batch(1.0)
    for row in look(model, batch):
        assert row["support"] == (TINY.length + 1) / 2
        assert row["log10_paths"] == pytest.approx(
            math.log10(math.comb(TINY.length + 3 - row["layer"], 4 - row["layer"]))
        )


def test_all_alphas_start_from_the_same_weights() -> None:
    first, second = (Trainer(run_config(TINY, alpha, 0)).model.state_dict() for alpha in (1.0, 2.0))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_norm_at_a_loss() -> None:
    history = {4.0: 1.0, 2.0: 4.0, 0.5: 1.0}
    assert [at_loss(history, loss) for loss in (4.0, 2.0, 1.0, 0.5)] == pytest.approx([1, 4, 2, 1])


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    monkeypatch.setitem(over_squashing.SCALES, "small", TINY)
    monkeypatch.setattr(over_squashing, "SEEDS", (0,))
    monkeypatch.setattr(over_squashing, "SEQUENCES", 2)
    monkeypatch.setattr(over_squashing, "LOOKS", 2)
    return list(over_squashing.PROBE.measure("small", lambda done, total, note: None))


def test_the_verdict_can_go_either_way(rows: list[Row], tmp_path: Path) -> None:
    def verdict(changed: dict[float, float], what: str) -> bool:
        return over_squashing.PROBE.verdict([row | {what: changed[row["alpha"]] + 0.0} for row in agreeing])[0]

    n = rows[0]["n"]
    agreeing = [
        row
        | {
            "gradient": row["alpha"],
            "log10_paths": 10 - row["alpha"],
            "support": (n + 1) / 2 if row["alpha"] == 1 else 3,
        }
        for row in rows
    ]
    assert over_squashing.PROBE.verdict(agreeing)[0]
    assert not verdict({1.0: 1, 1.5: 0.9, 2.0: 3}, "gradient")
    assert not verdict({1.0: 8, 1.5: 8, 2.0: 3}, "log10_paths")
    assert not verdict({1.0: 3, 1.5: 3, 2.0: 3}, "support")
    assert len(rows) == len(over_squashing.ALPHAS) * over_squashing.LAYERS * 3
    table = over_squashing.PROBE.table(rows)
    assert all(line.keys() == table[0].keys() for line in table)
    over_squashing.PROBE.draw(rows, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").exists()
