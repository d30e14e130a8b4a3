"""Training of a language model: exact resume, accumulation, the paper's schedule, and a clean end."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import log_of
from tiny_text import tiny_corpus

from longspan.nn.decoder import AttentionConfig, DecoderConfig
from longspan.nn.llama import flops_per_token, preset
from longspan.results import read_rows
from longspan.text.documents import CorpusError
from longspan.train import lm_loop
from longspan.train.checkpoint import load, saved
from longspan.train.config import edited
from longspan.train.lm import (
    RECIPES,
    LanguageConfig,
    LanguageTrainer,
    fingerprint,
    language_model_of,
    language_recipe,
    learning_rate,
)
from longspan.train.loop import Diverged, Outcome, Stop


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> LanguageConfig:
    """Twelve steps of milliseconds."""
    corpus = tiny_corpus(tmp_path_factory.mktemp("tiny"))
    recipe = language_recipe(corpus.folder, steps=12, context=32)
    model = replace(recipe.model, layers=1, dim=16, hidden=24, heads=2)
    return replace(
        recipe, model=model, batch=4, micro_batch=4, log_every=3, save_every=5, validate_every=7, validate_windows=5
    )


def changed(config: LanguageConfig, **changes: Any) -> LanguageConfig:
    for path, value in changes.items():
        config = edited(config, path.replace("__", "."), value)
    return config


def train(config: LanguageConfig, folder: Path, stop: Stop | None = None) -> Outcome:
    return lm_loop.run_language(config, folder, "cpu", lambda row: None, stop or Stop())


def numbers(folder: Path) -> list[dict[str, Any]]:
    rows = {row["step"]: row for row in log_of(folder, "train")}
    return [{key: value for key, value in row.items() if "per_second" not in key} for row in rows.values()]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stops", [(1,), (5, 6), (11,)], ids=str)
def test_interrupted_and_resumed_is_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: LanguageConfig, optimizer: str, stops: tuple[int, ...]
) -> None:
    config = changed(config, optimizer__name=optimizer)
    train(config, tmp_path / "whole")
    for step in stops:
        stop = Stop()
        advance = LanguageTrainer.advance

        def wrapped(self: LanguageTrainer, stop: Stop = stop, step: int = step, advance: Any = advance) -> None:
            advance(self)
            stop.wanted = self.step == step

        with monkeypatch.context() as patch:
            patch.setattr(LanguageTrainer, "advance", wrapped)
            outcome = train(config, tmp_path / "parts", stop)
        assert (outcome.ending, outcome.step) == ("stopped", step)
    assert train(config, tmp_path / "parts").ending == "finished"
    mine, theirs = (load(saved(tmp_path / name / "checkpoints")[-1]) for name in ("parts", "whole"))
    assert mine.step == theirs.step == 12
    assert [name for name, tensor in mine.tensors.items() if not torch.equal(tensor, theirs.tensors[name])] == []
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    assert log_of(tmp_path / "parts", "validate") == log_of(tmp_path / "whole", "validate")


def test_gradients_add_up_to_those_of_the_whole_batch(config: LanguageConfig) -> None:
    whole, parts, uneven = (LanguageTrainer(changed(config, micro_batch=rows)) for rows in (4, 1, 3))
    for trainer in (whole, parts, uneven):
        for _ in range(3):
            trainer.advance()
    for name, parameter in whole.model.named_parameters():
        for other in (parts, uneven):
            assert torch.allclose(parameter, dict(other.model.named_parameters())[name], atol=2e-5), name
    assert parts.metrics() == pytest.approx(whole.metrics(), rel=1e-4)


def test_the_loss_is_the_mean_over_the_tokens_that_count(config: LanguageConfig) -> None:
    trainer = LanguageTrainer(changed(config, context=512))  # long enough for several documents
    batch = trainer.windows.draw(0)
    assert batch.documents is not None
    assert batch.documents.any()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)  # far enough from the start for attention to matter
        logits = trainer.model(batch.tokens, documents=batch.documents).log_softmax(-1)
        expected = -logits.gather(-1, batch.targets[..., None]).squeeze(-1)[batch.mask].mean()
    trainer.advance()
    assert trainer.metrics().loss == pytest.approx(float(expected), rel=1e-5)


def test_training_learns(tmp_path: Path, config: LanguageConfig) -> None:
    train(changed(config, steps=60, cooldown=6, optimizer__learning_rate=0.02), tmp_path)
    losses = [row["loss"] for row in log_of(tmp_path, "train")]
    assert losses[-1] < losses[0] - 1
    loaded = load(saved(tmp_path / "checkpoints")[-1])
    model, theirs = language_model_of(loaded)
    trainer = LanguageTrainer(theirs)
    trainer.restore(loaded)
    assert trainer.validation_loss() == pytest.approx(log_of(tmp_path, "validate")[-1]["loss"])
    assert not model.training


def test_the_log_tells_tokens_and_throughput(tmp_path: Path, config: LanguageConfig) -> None:
    train(config, tmp_path)
    rows = log_of(tmp_path, "train")
    assert [row["step"] for row in rows] == [3, 6, 9, 12]
    assert [row["tokens"] for row in rows] == [128 * step for step in (3, 6, 9, 12)]
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert all(row["utilisation"] is None for row in rows)  # nobody knows a CPU's peak
    each = flops_per_token(config.model, config.context)
    assert all(row["flops_per_second"] == pytest.approx(each * row["tokens_per_second"]) for row in rows)
    assert [row["step"] for row in log_of(tmp_path, "validate")] == [7, 12]
    assert len(saved(tmp_path / "checkpoints")) == 2


def test_operations_are_counted_as_utilisation_counts_them() -> None:
    weights = 24 * (4 * 768**2 + 3 * 768 * 3072) + 128_256 * 768 + 49 * 768  # blocks, output, norms
    assert flops_per_token(preset("420m"), 2048) == 6 * weights + 12 * 24 * 768 * 2048


def test_the_schedule_is_the_papers(config: LanguageConfig) -> None:
    paper = replace(
        config, steps=13_500, cooldown=1_350, optimizer=replace(config.optimizer, learning_rate=3e-4, warmup=1_350)
    )
    rates = [3e-4 * learning_rate(step, paper) for step in range(13_500)]
    assert rates[0] == pytest.approx(3e-4 / 1350)
    assert rates[1349:12_150] == [3e-4] * 10_801
    assert rates[12_150 + 674] == pytest.approx((3e-4 + 3e-5) / 2)
    assert rates[-1] == pytest.approx(3e-5)
    assert rates[12_150:] == sorted(rates[12_150:], reverse=True)
    assert RECIPES["420m"].context * RECIPES["420m"].batch == 524_288
    assert RECIPES["420m"].steps == 13_500


def test_the_recipe_of_a_preset_follows_its_steps(config: LanguageConfig) -> None:
    recipe = language_recipe(Path(config.corpus), "50m", "softmax", "rope", steps=1000)
    assert (recipe.optimizer.warmup, recipe.cooldown, recipe.lowest_rate) == (100, 100, 0.1)
    assert recipe.model.attention.method == "softmax"
    assert recipe.model.attention.slopes == "exponential"
    assert (recipe.name, recipe.context) == ("lm/50m/rope/softmax", 1024)


def test_a_run_is_known_by_its_tokens_not_by_its_folder(config: LanguageConfig) -> None:
    assert fingerprint(config) == fingerprint(changed(config, corpus="elsewhere", micro_batch=1, log_every=1))
    assert fingerprint(config) != fingerprint(changed(config, data="0123456789ab"))
    assert fingerprint(config) != fingerprint(changed(config, documents="joined"))


def test_the_fingerprint_is_stable() -> None:
    """Rows and folders of runs carry it."""
    model = DecoderConfig(50, 2, 16, 32, 2, AttentionConfig("asentmax"))
    assert fingerprint(LanguageConfig(corpus="x", data="abc", model=model)) == "4844f20efd9a"


def test_what_does_not_fit_together_is_told(tmp_path: Path, config: LanguageConfig) -> None:
    with pytest.raises(CorpusError, match="holds other tokens"):
        LanguageTrainer(changed(config, data="0123456789ab"))
    with pytest.raises(CorpusError, match="300 tokens, the model's vocabulary is 7"):
        LanguageTrainer(replace(config, model=DecoderConfig(7, 1, 16, 24, 2)))
    with pytest.raises(CorpusError, match="does not fit"):
        LanguageTrainer(changed(config, context=1 << 20))
    with pytest.raises(ValueError, match="batch must be at least 1"):
        LanguageTrainer(changed(config, batch=0))
    with pytest.raises(ValueError, match="validate_windows must be at least 1"):
        LanguageTrainer(changed(config, validate_windows=0))
    with pytest.raises(ValueError, match="cooldown"):
        LanguageTrainer(changed(config, cooldown=13))
    with pytest.raises(ValueError, match=r"lowest_rate .* between 0 and 1"):
        LanguageTrainer(changed(config, lowest_rate=-3.0))
    with pytest.raises(ValueError, match="learning_rate must be positive"):
        LanguageTrainer(replace(config, optimizer=replace(config.optimizer, learning_rate=-1.0)))
    train(config, tmp_path)
    with pytest.raises(ValueError, match="holds a run of another config"):
        train(changed(config, seed=1), tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("optimizer.clip", 0, "clip must be above 0, or null"),
        ("optimizer.betas", [0.9, 1.0], "betas must be at least 0 and below 1"),
        ("optimizer.weight_decay", -1, "weight_decay must be at least 0"),
        ("optimizer.warmup", -5, "warmup must be at least 0"),
        ("optimizer.momentum", 2, "momentum must be at least 0 and below 1"),
        ("model.layers", 0, "model.layers must be at least 1"),
        ("model.heads", 0, "model.heads must be at least 1"),
        ("seed", 1 << 70, r"seed must be at least 0 and below 2\^64"),
        ("model.attention.qk_noise", 0.5, "qk_noise is for the tasks"),
    ],
    ids=lambda value: value if isinstance(value, str) and "must" not in value else "",
)
def test_what_would_train_something_else_is_refused(
    config: LanguageConfig, path: str, value: Any, message: str
) -> None:
    config = edited(config, "model.attention.qk_norm", True)
    with pytest.raises(ValueError, match=message):
        LanguageTrainer(edited(config, path, value))


def test_validation_reads_the_model_as_it_is_measured(monkeypatch: pytest.MonkeyPatch, config: LanguageConfig) -> None:
    trainer, modes = LanguageTrainer(config), []
    loss = LanguageTrainer._loss

    def spy(self: LanguageTrainer, batch: Any) -> torch.Tensor:
        modes.append(self.model.training)
        return loss(self, batch)

    monkeypatch.setattr(LanguageTrainer, "_loss", spy)
    trainer.validation_loss()
    trainer.advance()
    assert modes == [False, False, True]


def test_a_validation_that_was_cut_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: LanguageConfig
) -> None:
    config = changed(config, validate_every=5)

    def cut(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lm_loop, "_validate", cut)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path)
    train(config, tmp_path)
    assert [row["step"] for row in log_of(tmp_path, "validate")] == [5, 10, 12]


@pytest.mark.parametrize("text", ["", "[]"], ids=["empty", "a-list"])
def test_a_damaged_config_of_a_run_is_told_by_its_name(tmp_path: Path, config: LanguageConfig, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: "):
        train(config, tmp_path)


def test_a_run_that_diverges_keeps_its_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: LanguageConfig
) -> None:
    advance = LanguageTrainer.advance

    def poisoned(self: LanguageTrainer) -> None:
        advance(self)
        if self.step == 7:
            with torch.no_grad():
                self.model.embed.weight.fill_(torch.nan)

    monkeypatch.setattr(LanguageTrainer, "advance", poisoned)
    with pytest.raises(Diverged, match="the loss is nan after 9 steps"):
        train(config, tmp_path)
    assert [load(path).step for path in saved(tmp_path / "checkpoints")] == [5]
    last = list(read_rows(tmp_path / "log.jsonl"))[-1]
    assert (last["event"], last["step"]) == ("diverged", 9)


def test_a_folder_has_one_run_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: LanguageConfig
) -> None:
    advance, refused = LanguageTrainer.advance, []

    def begin_another(self: LanguageTrainer) -> None:
        with pytest.raises(ValueError, match="is being trained by another process"):
            train(config, tmp_path)
        refused.append(self.step)
        advance(self)

    config = replace(config, steps=2)
    monkeypatch.setattr(LanguageTrainer, "advance", begin_another)
    train(config, tmp_path)
    assert refused == [0, 1]


def test_the_rate_falls_as_a_cosine(config: LanguageConfig) -> None:
    short = replace(config, steps=100, cooldown=40, lowest_rate=0.1)
    quarters = [learning_rate(59 + after, short) for after in (0, 10, 20, 30, 40)]
    assert quarters == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * part / 4)) / 2 for part in range(5)])
