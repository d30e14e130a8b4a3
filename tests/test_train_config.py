"""A run as a value: to JSON and back, its fingerprint, its edits, and the errors that name a field."""

import json
from dataclasses import replace
from typing import Any

import pytest

from longspan.nn.decoder import AttentionConfig, DecoderConfig
from longspan.train.config import OptimizerConfig, RunConfig, check, edited, fingerprint, from_json, to_json
from longspan.train.trainer import Trainer

CONFIG = RunConfig(
    task="copy",
    name="mine",
    task_options={"num_symbols": 5},
    model=DecoderConfig(8, layers=1, dim=16, hidden=24, heads=2, attention=AttentionConfig(alpha="learned")),
    optimizer=OptimizerConfig("muon", betas=(0.8, 0.95), clip=None),
    shortest=3,
    longest=6,
    average=0.9,
    validate_lengths=(8, 16),
)


def test_json_and_back() -> None:
    text = json.dumps(to_json(CONFIG))
    assert from_json(RunConfig, json.loads(text)) == CONFIG
    assert from_json(RunConfig, {"task": "copy", "model": to_json(CONFIG.model)}).steps == 10_000


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("steps", "5", 5),
        ("steps", "1000", 1000),
        ("optimizer.learning_rate", "3e-4", 3e-4),
        ("optimizer.learning_rate", "1", 1.0),
        ("optimizer.betas", "[0.9, 0.999]", (0.9, 0.999)),
        ("optimizer.clip", "null", None),
        ("optimizer.clip", "None", None),
        ("optimizer.name", "adamw", "adamw"),
        ("average", "null", None),
        ("precision", "bfloat16", "bfloat16"),
        ("validate_lengths", "[64]", (64,)),
        ("validate_lengths", "[]", ()),
        ("validate_every", "50", 50),
        ("task_options", '{"num_symbols": 9}', {"num_symbols": 9}),
        ("task_options", '{"density": 0.5}', {"density": 0.5}),
        ("task_options", "{}", {}),
        ("name", "words with spaces", "words with spaces"),
        ("model.layers", "3", 3),
        ("model.attention.alpha", "1.75", 1.75),
        ("model.attention.alpha", "learned", "learned"),
        ("model.attention.top_fraction", "0.5", 0.5),
        ("model.attention.initial_beta", "null", None),
        ("model.attention.slopes", "exponential", "exponential"),
        ("model.attention.qk_norm", "true", True),
    ],
)
def test_an_edit_changes_one_field(path: str, text: str, value: object) -> None:
    changed = edited(CONFIG, path, text)
    found: Any = changed
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)
    *outer, last = path.split(".")
    before: Any = CONFIG
    for name in outer:
        before = getattr(before, name)
    assert edited(changed, path, getattr(before, last)) == CONFIG


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("step", "5", "no field 'step'; RunConfig has task, model, name"),
        ("model.attention.alfa", "5", "no field 'alfa'; AttentionConfig has method"),
        ("steps", "many", "steps must be int, got 'many'"),
        ("steps", "2.5", "steps must be int, got 2.5"),
        ("steps", "true", "steps must be int, got True"),
        ("steps", "null", "steps must be int, got None"),
        ("steps.more", "5", "'steps' is a plain value and has no field 'more'"),
        ("optimizer.name", "sgd", r"name must be Literal\['adamw', 'muon'\], got 'sgd'"),
        ("optimizer.betas", "[0.9]", "betas must be tuple"),
        ("optimizer.betas", "0.9", "betas must be tuple"),
        ("optimizer.learning_rate", "fast", "learning_rate must be float, got 'fast'"),
        ("validate_lengths", "[1, 2.5]", "validate_lengths must be int, got 2.5"),
        ("task_options", '{"num_symbols": "many"}', "task_options must be float, got 'many'"),
        ("model.attention.qk_norm", "1", "qk_norm must be bool, got 1"),
        ("model", "5", "model must be DecoderConfig, got 5"),
        ("optimizer.learning_rate", "NaN", "learning_rate must be float, got nan"),
        ("optimizer.clip", "Infinity", r"clip must be float \| None, got inf"),
        ("model.attention.delta", "1" + 400 * "0", "delta must be float, got 1000"),
        ("training_options", '{"few": NaN}', "training_options must be float, got nan"),
    ],
)
def test_an_edit_that_cannot_be_names_the_field(path: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        edited(CONFIG, path, text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(stepz=5), "RunConfig: unknown fields stepz"),
        (lambda data: data["model"].update(depth=5), "model: unknown fields depth"),
        (lambda data: data["model"]["attention"].update(a=1, b=2), "model.attention: unknown fields a, b"),
        (lambda data: data["model"].update(layers="two"), "model.layers must be int, got 'two'"),
        (lambda data: data["optimizer"].update(betas=[1, "x"]), "optimizer.betas must be float, got 'x'"),
        (lambda data: data.pop("task"), "RunConfig: .*'task'"),
        (lambda data: data["model"].pop("heads"), "model: .*'heads'"),
    ],
    ids=["top", "nested", "deep", "type", "item", "missing", "missing-nested"],
)
def test_json_that_cannot_be_names_the_field(change: Any, message: str) -> None:
    data = to_json(CONFIG)
    change(data)
    with pytest.raises(ValueError, match=message):
        from_json(RunConfig, data)


WATCHED = {
    "name": "another",
    "log_every": 7,
    "save_every": 7,
    "validate_every": 7,
    "validate_lengths": (7,),
    "validate_samples": 7,
    "test_lengths": (7,),
    "test_samples": 7,
}


@pytest.mark.parametrize("field", WATCHED)
def test_the_fingerprint_leaves_out_how_a_run_is_watched(field: str) -> None:
    assert fingerprint(edited(CONFIG, field, WATCHED[field])) == fingerprint(CONFIG)


def test_the_fingerprint_changes_with_everything_else() -> None:
    changes: dict[str, object] = {
        "task": "reverse",
        "task_options": {"num_symbols": 6},
        "training_options": {"num_symbols": 6},
        "steps": 7,
        "batch": 7,
        "shortest": 1,
        "longest": 7,
        "seed": 7,
        "average": None,
        "precision": "bfloat16",
        "noise_from": 0.5,
        "first_alphas": [[5, 1.0]],
        "optimizer.momentum": 0.5,
        "optimizer.clip": 0.5,
        "model.hidden": 32,
        "model.attention.alpha": 1.5,
        "model.attention.delta": 0.5,
        "model.attention.slope_factor": 0.25,
        "model.attention.qk_noise_on": "all",
        "model.attention.qk_noise_layers": 1,
    }
    assert {path.split(".")[0] for path in changes} | set(WATCHED) == set(to_json(CONFIG))
    prints = [fingerprint(CONFIG), *(fingerprint(edited(CONFIG, path, value)) for path, value in changes.items())]
    assert len(set(prints)) == len(changes) + 1
    assert all(len(text) == 12 and int(text, 16) >= 0 for text in prints)


def test_a_whole_number_for_a_float_is_the_same_run() -> None:
    whole = replace(CONFIG, optimizer=OptimizerConfig(learning_rate=1, clip=1))
    assert fingerprint(whole) == fingerprint(from_json(RunConfig, to_json(whole)))


def test_the_fingerprint_is_stable() -> None:
    assert fingerprint(CONFIG) == "9f0dba822531"  # result rows carry it


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("steps", 0, "steps must be at least 1, got 0"),
        ("batch", 0, "batch must be at least 1"),
        ("log_every", 0, "log_every must be at least 1"),
        ("save_every", -1, "save_every must be at least 1"),
        ("test_samples", 0, "test_samples must be at least 1"),
        ("longest", 2, r"shortest \(3\) must not be above longest \(2\)"),
        ("average", 1.0, "average must be at least 0 and below 1"),
        ("task", "copyy", "unknown task 'copyy'"),
        ("task_options", {"num_symbols": 6}, "copy has 9 tokens, the model's vocabulary is 8"),
        ("task_options", {"symbols": 6}, "copy has no field symbols"),
        ("task_options", {"num_symbols": 5.0}, "copy: num_symbols must be int, got 5.0"),
        ("training_options", {"num_symbols": 5.0}, "copy: num_symbols must be int, got 5.0"),
        ("seed", -1, "seed must be at least 0"),
        ("seed", 1 << 64, "seed must be at least 0 and below 2"),
        ("validate_every", 0, "validate_every must be at least 1, got 0"),
        ("validate_lengths", [6, -1], "copy: length -1 is too short"),  # and not when the first validation is due
        ("test_lengths", [0], "copy: length 0 is too short"),
        ("model.layers", 0, "model.layers must be at least 1, got 0"),
        ("model.dim", 0, "model.dim must be at least 1"),
        ("model.hidden", -1, "model.hidden must be at least 1"),
        ("model.heads", 0, "model.heads must be at least 1"),
        ("model.heads", 5, "does not divide"),
        ("optimizer.learning_rate", -1e-3, "optimizer.learning_rate must be at least 0, got -0.001"),
        ("optimizer.muon_learning_rate", -1, "optimizer.muon_learning_rate must be at least 0"),
        ("optimizer.weight_decay", -1, "optimizer.weight_decay must be at least 0"),
        ("optimizer.warmup", -1, "optimizer.warmup must be at least 0"),
        ("optimizer.momentum", 1, "optimizer.momentum must be at least 0 and below 1, got 1.0"),
        ("optimizer.betas", [0.9, 1], r"optimizer.betas must be at least 0 and below 1, got \[0.9, 1.0\]"),
        ("optimizer.clip", 0, "optimizer.clip must be above 0, or null, got 0.0"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_it_starts(path: str, value: object, message: str) -> None:
    check(CONFIG)
    with pytest.raises(ValueError, match=message):
        Trainer(edited(CONFIG, path, value))


def test_a_start_of_sentmax_that_was_once_not_obeyed_is_another_run() -> None:
    """Of one that was, the number is as old as the others."""

    def printed(**options: Any) -> str:
        attention = replace(CONFIG.model.attention, method="sentmax", **options)
        return fingerprint(replace(CONFIG, model=replace(CONFIG.model, attention=attention)))

    assert printed(delta=1.0, initial_beta=None) == "c72906730978"
    assert printed(delta=0.0, initial_beta=0.25) != "6fd107622b98"
