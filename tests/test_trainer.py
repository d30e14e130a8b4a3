"""The step and its data: batches from the seed and the step alone, the average of the weights, and that it learns."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from tiny_runs import TINY, tiny
from torch import nn

from longspan.evaluate import ladder
from longspan.evaluate.ladder import measure
from longspan.paper.recipes import recipe, smoke
from longspan.tasks.base import PURPOSES, stream_seed
from longspan.train.config import fingerprint
from longspan.train.trainer import Trainer, judged, model_of


def test_a_batch_is_a_function_of_the_seed_and_the_step() -> None:
    fresh, used, other = Trainer(TINY), Trainer(tiny(model__hidden=32, optimizer__name="adamw")), Trainer(tiny(seed=1))
    for _ in range(3):
        used.advance()
    torch.rand(5)
    for step in (9, 0, 4):
        length, batch = fresh.draw(step)
        for trainer, equal in ((used, True), (other, False)):
            its_length, its_batch = trainer.draw(step)
            same = length == its_length and all(map(torch.equal, batch, its_batch))
            assert same is equal
    rows = torch.cat([nn.functional.pad(fresh.draw(step)[1].tokens, (0, 20))[:, :14] for step in range(50)])
    assert len(rows.unique(dim=0)) > 0.9 * len(rows)


def test_lengths_fill_the_range() -> None:
    trainer = Trainer(TINY)
    lengths = [trainer.draw(step)[0] for step in range(200)]
    assert set(lengths) == {3, 4, 5, 6}
    assert all(lengths.count(length) > 30 for length in (3, 4, 5, 6))


def test_options_of_training_are_not_those_of_the_test() -> None:
    config = replace(smoke(recipe("paper/sort/nape/asentmax")), training_options={"few": 1.0}, batch=64)
    trainer = Trainer(config)
    _, batch = trainer.draw(0)
    kinds = [len(set(row)) for row in batch.targets.tolist()]
    assert min(kinds) < 6
    assert trainer.task == type(trainer.task)(**config.task_options)
    assert fingerprint(config) != fingerprint(replace(config, training_options={}))
    with pytest.raises(ValueError, match="sort has 7 tokens"):
        Trainer(replace(config, training_options={"num_symbols": 4}))
    with pytest.raises(ValueError, match="fewer"):
        Trainer(replace(config, training_options={"fewer": 1.0}))


def test_training_validation_and_test_samples_are_different_streams() -> None:
    seeds = {
        purpose: {stream_seed(purpose, seed, index) for seed, index in product(range(20), range(50))}
        for purpose in PURPOSES
    }
    assert not seeds["train"] & seeds["validation"]
    assert not seeds["train"] & seeds["test"]
    assert not seeds["validation"] & seeds["test"]

    task = Trainer(tiny(shortest=12, longest=12, batch=64)).task
    drawn = [next(ladder._batches(task, 12, 64, purpose, 64)).tokens for purpose in ("validation", "test")]
    drawn += [Trainer(tiny(shortest=12, longest=12, batch=64, seed=seed)).draw(0)[1].tokens for seed in (0, 12)]
    assert len(torch.cat(drawn).unique(dim=0)) == 4 * 64


def test_the_loss_counts_the_answer_alone() -> None:
    trainer = Trainer(TINY)
    _, batch = trainer.draw(0)
    with torch.no_grad():
        logits = trainer.model(batch.tokens)[batch.mask]
    targets = batch.targets[batch.mask]
    trainer.advance()
    metrics = trainer.metrics()
    assert metrics.loss == pytest.approx(float(nn.functional.cross_entropy(logits, targets)), rel=1e-5)
    assert metrics.token_accuracy == pytest.approx(float((logits.argmax(-1) == targets).float().mean()))


def test_metrics_are_means_since_the_last_look() -> None:
    one, many = Trainer(TINY), Trainer(TINY)
    seen = []
    for _ in range(4):
        one.advance()
        seen.append(one.metrics())
        many.advance()
    together = many.metrics()
    assert together.loss == pytest.approx(sum(each.loss for each in seen) / 4)
    assert together.gradient_norm == pytest.approx(sum(each.gradient_norm for each in seen) / 4)
    assert 0 <= together.token_accuracy <= 1
    assert many.metrics() == (0, 0, 0)


def test_the_average_of_the_weights() -> None:
    trainer = Trainer(tiny(average=0.8))
    expected = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    for _ in range(6):
        trainer.advance()
        for name, parameter in trainer.model.named_parameters():
            expected[name] = 0.8 * expected[name] + 0.2 * parameter.detach()
    averaged, config = model_of(trainer.checkpoint())
    assert config == trainer.config
    assert not averaged.training
    for (name, found), live in zip(averaged.named_parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), expected[name], rtol=1e-5, atol=1e-7)
        assert not torch.equal(found, live)


def test_without_an_average_the_weights_themselves_are_measured() -> None:
    trainer = Trainer(tiny(average=None))
    trainer.advance()
    checkpoint = trainer.checkpoint()
    assert not any(name.startswith("average.") for name in checkpoint.tensors)
    model, _ = model_of(checkpoint)
    assert all(map(torch.equal, model.parameters(), trainer.model.parameters()))


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # a norm's weights are float32, its input may be bfloat16
def test_bfloat16_training_keeps_float32_weights() -> None:
    rough_one, fine_one = (Trainer(tiny(precision=precision)) for precision in ("bfloat16", "float32"))
    for trainer in (rough_one, fine_one):
        trainer.advance()
        assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
    rough, fine = rough_one.metrics().loss, fine_one.metrics().loss
    assert rough == pytest.approx(fine, rel=0.02)
    assert rough != fine


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_copies_in_bfloat16_change_no_number() -> None:
    """Loss and gradients are those of autocast over the float32 weights, to the last bit, also after a resumption."""
    trainer = Trainer(tiny(precision="bfloat16"))
    assert trainer.replica is not trainer.model
    for _ in range(3):
        trainer.advance()
    resumed = Trainer(trainer.config)
    resumed.restore(trainer.checkpoint())
    for each in (trainer, resumed):
        length, batch = each.draw(7)
        last = each._tail(length, batch)
        loss, _ = each._loss(*batch, last)
        assert each.copies is not None
        parameters = dict(each.replica.named_parameters())
        assert parameters["blocks.0.gate.weight"].dtype == torch.bfloat16
        assert parameters["embed.weight"] is each.model.embed.weight
        gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
        found = each.copies.full(gradients)
        with torch.autocast("cpu", torch.bfloat16):
            logits = each.model(batch.tokens, last=last)
        expected_loss, _ = judged(logits, batch.targets[:, -last:], batch.mask[:, -last:])
        expected = torch.autograd.grad(expected_loss, list(each.model.parameters()))
        assert torch.equal(loss, expected_loss)
        for (name, _), gradient in zip(each.model.named_parameters(), expected, strict=True):
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], gradient), name


def test_a_smoke_run_learns() -> None:
    """The smoke edit of the README with shorter sequences, so that seconds are enough."""
    config = smoke(recipe("longspan/copy/nape/asentmax"))
    config = replace(config, shortest=3, longest=6, steps=200, optimizer=replace(config.optimizer, warmup=20))
    trainer = Trainer(config)
    trainer.advance()
    first = trainer.metrics().loss
    while trainer.step < config.steps:
        trainer.advance()
    assert trainer.metrics().loss < first / 3
    assert measure(trainer.model, trainer.task, 6, 200).value > 90
