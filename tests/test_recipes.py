"""The recipes: one for every cell of the paper's synthetic tables, at the paper's sizes, and a small edit of each."""

import math
from dataclasses import replace
from itertools import product

import pytest

from longspan.nn.decoder import AttentionConfig
from longspan.paper.recipes import recipe, recipe_names, smoke
from longspan.paper.tables import get_table, table_names
from longspan.tasks import get_task
from longspan.train.config import RunConfig, check, from_json, to_json
from longspan.train.trainer import Trainer

TASKS = ("2back", "local_count", "flip_flop_sparse", "flip_flop_dense", "copy", "reverse", "mqmtar", "sort")
POSITIONS = ("rope", "nope", "alibi", "nape")
METHODS = ("softmax", "ssmax", "assmax", "entmax", "sentmax", "asentmax", "topk_16", "topk_32", "topk_half")


def test_the_names_are_stable() -> None:
    cells = {f"{task}/{position}/{method}" for task, position, method in product(TASKS, POSITIONS, METHODS)}
    cells |= {f"{task}/nope/stick_breaking" for task in TASKS}
    names = recipe_names()
    assert len(names) == len(set(names)) == 592
    assert set(names) == {f"{author}/{cell}" for author, cell in product(("paper", "longspan"), cells)}


# These two tables are not about the decoder's methods: another model, and one method with other options.
@pytest.mark.parametrize("name", sorted(set(table_names()) - {"max_retrieval", "rope_factor"}))
def test_every_cell_of_a_table_has_a_recipe(name: str) -> None:
    task = name.removeprefix("main/")
    assert {f"paper/{task}/{row.position}/{row.method}" for row in get_table(name).rows} <= set(recipe_names())


def test_every_recipe_builds_and_its_smoke_edit_too() -> None:
    for name in recipe_names():
        author, task, position, method = name.split("/")
        config = recipe(name)
        assert (config.name, config.task, config.model.attention.position) == (name, task, position)
        assert config.model.attention.method == method.partition("_")[0] or method == "stick_breaking"
        for each in (config, smoke(config)):
            check(each)
            assert each.model.vocabulary == get_task(task, **each.task_options).vocabulary
            assert from_json(RunConfig, to_json(each)) == each
        assert smoke(config).name == f"{name}/smoke"
        assert (config.optimizer.name == "muon") == (author == "longspan" and task != "sort")
        assert config.training_options == ({"few": 0.5} if name.startswith("longspan/sort/") else {})


# The paper's table "Task details and hyperparameters"; the steps are its samples / 128.
@pytest.mark.parametrize(
    ("task", "samples", "lengths", "vocabulary", "heads", "layers", "dim", "hidden"),
    [
        ("2back", 10e6, (32, 64), 16, 8, 2, 256, 512),
        ("local_count", 10e6, (64, 128), 48, 8, 3, 128, 512),  # counts below 48 need more ids than its 16 symbols
        ("flip_flop_sparse", 10e6, (32, 64), 3 + 5, 8, 4, 256, 512),
        ("flip_flop_dense", 10e6, (32, 64), 3 + 5, 8, 4, 256, 512),
        ("copy", 20e6, (32, 64), 3 + 32, 16, 2, 256, 1024),
        ("reverse", 30e6, (32, 64), 3 + 32, 8, 6, 256, 512),
        ("mqmtar", 50e6, (32, 64), 3 + 3 + 256, 16, 4, 512, 1024),
        ("sort", 40e6, (32, 64), 3 + 32, 8, 2, 256, 1024),
    ],
)
def test_the_sizes_are_the_papers(
    task: str, samples: float, lengths: tuple[int, int], vocabulary: int, heads: int, layers: int, dim: int, hidden: int
) -> None:
    paper, ours = (recipe(f"{author}/{task}/nape/asentmax") for author in ("paper", "longspan"))
    for config in (paper, ours):
        model = config.model
        assert (model.heads, model.layers, model.dim, model.hidden) == (heads, layers, dim, hidden)
        assert (model.vocabulary, config.batch) == (vocabulary, 128)
        assert (config.shortest, config.longest) == lengths
        assert config.test_lengths == get_table(task).lengths
        assert config.test_samples == 1000
        assert config.precision == "bfloat16"
    assert paper.steps == samples / 128
    assert paper.optimizer.weight_decay == 0
    assert max(paper.validate_lengths) == 8 * lengths[1]


OURS = AttentionConfig(delta=0.0, initial_beta=0.25, initial_gamma=1.0, qk_norm=True, qk_gain=0.4)


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("paper/copy/nape/asentmax", AttentionConfig(initial_beta=None)),
        ("longspan/sort/nape/asentmax", AttentionConfig(initial_beta=None, slope_factor=16.0)),
        ("longspan/copy/nape/asentmax", replace(OURS, qk_noise=0.5, qk_noise_on="all")),
        ("longspan/reverse/nape/asentmax", replace(OURS, qk_noise=1.0, qk_noise_on="all")),
        (
            "longspan/flip_flop_sparse/nape/asentmax",
            replace(OURS, slopes="exponential", qk_noise=1.0, qk_noise_on="all"),
        ),
        ("longspan/flip_flop_dense/nape/asentmax", replace(OURS, slopes="exponential")),
        ("longspan/local_count/nape/asentmax", replace(OURS, slopes="exponential", rope_original_length=128)),
        ("paper/copy/rope/topk_16", AttentionConfig("topk", "rope", top_k=16, rope_factor=16.0, initial_beta=None)),
        ("paper/copy/alibi/topk_half", AttentionConfig("topk", "alibi", top_fraction=0.5, initial_beta=None)),
        ("paper/copy/nope/stick_breaking", AttentionConfig("stick_breaking", "nope", initial_beta=None)),
        (
            "paper/local_count/rope/softmax",
            AttentionConfig("softmax", "rope", rope_factor=16.0, rope_original_length=128, initial_beta=None),
        ),
    ],
)
def test_the_attention_of_a_recipe(name: str, attention: AttentionConfig) -> None:
    assert recipe(name).model.attention == attention


@pytest.mark.parametrize(
    "name",
    ["copy", "paper/copy", "paper/copy/nape/hardmax", "paper/copy/nape/stick_breaking", "ours/copy/nape/softmax", ""],
)
def test_an_unknown_recipe_says_where_to_look(name: str) -> None:
    with pytest.raises(ValueError, match=f"there is no recipe '{name}'; `longspan recipes` lists them"):
        recipe(name)


# Every method at every position on one task, and every task by one method of each author.
SAMPLE = [name for name in recipe_names() if name.startswith("paper/copy/")]
SAMPLE += [f"{author}/{task}/nape/asentmax" for author, task in product(("paper", "longspan"), TASKS)]


@pytest.mark.parametrize("name", SAMPLE)
def test_a_smoke_edit_trains(name: str) -> None:
    trainer = Trainer(replace(smoke(recipe(name)), batch=4))
    for _ in range(2):
        trainer.advance()
    metrics = trainer.metrics()
    assert math.isfinite(metrics.loss)
    assert metrics.loss < 1.5 * math.log(trainer.config.model.vocabulary)
    assert math.isfinite(metrics.gradient_norm)
