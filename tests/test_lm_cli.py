"""`longspan lm` from a folder of text to rows, and what it says when something is wrong."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_cli import invoke, succeed
from tiny_runs import log_of
from tiny_text import write_texts

from longspan import cli
from longspan.results import read_rows
from longspan.text.corpora import open_corpus

SMALL = ["--steps=4", "--context=32", "--set=batch=4", "--set=model.layers=1", "--device=cpu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a corpus and a run; the commands run in it."""
    folder = tmp_path_factory.mktemp("lm")
    write_texts(folder / "texts", [60] * 40 + [400] * 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "120")
        output = succeed("lm", "corpus", "corpus", "--folder=texts", "--vocabulary=300", "--validation=0.2")
        assert "left out: none" in output
        succeed("lm", "train", "corpus", *SMALL, "--position=rope", "--out=run")
        yield folder


def test_a_corpus_and_a_run_lie_where_they_are_said_to(trained: Path) -> None:
    facts = json.loads((trained / "corpus" / "corpus.json").read_text())
    assert facts["train"]["documents"] + facts["validation"]["documents"] == 60
    assert facts["source"] == "texts"
    assert len(log_of(trained / "run", "finished")) == 1
    output = succeed("lm", "train", "corpus", *SMALL, "--position=rope", "--out=run")
    assert "going on from step 4" in output
    assert "finished at step 4: run" in output


def test_a_run_is_named_after_what_it_is(trained: Path) -> None:
    output = succeed("lm", "train", "corpus", *SMALL, "--method=softmax", "--seed=3")
    name = "runs/lm-tiny-nape-softmax+batch=4+model.layers=1-s3"
    assert f"finished at step 4: {name}" in output.replace("\n", "")
    config = json.loads((trained / name / "config.json").read_text())
    assert (config["context"], config["batch"], config["model"]["layers"]) == (32, 4, 1)
    succeed("lm", "train", "corpus", *SMALL, "--precision=float32", "--out=plain")
    unusual = ("--documents=joined", "--precision=bfloat16", "--out=unusual")
    succeed("lm", "train", "corpus", *SMALL, *unusual)
    names = [json.loads((trained / run / "config.json").read_text())["name"] for run in ("plain", "unusual")]
    assert names == [
        f"lm/tiny/nape/asentmax{more}+batch=4+model.layers=1" for more in ("", "+documents=joined+precision=bfloat16")
    ]


@pytest.mark.parametrize("scoring", ["same", "all"])
def test_perplexity_writes_a_row_a_length(trained: Path, scoring: str) -> None:
    before = len(list(read_rows(trained / "run/results.jsonl"))) if (trained / "run/results.jsonl").exists() else 0
    succeed("lm", "perplexity", "run", f"--scoring={scoring}", "--length=32", "--length=128", "--device=cpu")
    rows = list(read_rows(trained / "run/results.jsonl"))[before:]
    assert [(row["task"], row["length"], row["scoring"]) for row in rows] == [
        ("lm-perplexity", 32, scoring),
        ("lm-perplexity", 128, scoring),
    ]
    assert all(1 < row["low"] < row["value"] < row["high"] < 1000 for row in rows)
    told = (open_corpus(Path("corpus")).split("validation").checksum, 128, 16 if scoring == "same" else None)
    assert {(row["data"], row["longest"], row["scored"]) for row in rows} == {told}
    assert {row["variant"] for row in rows} == {row["config"] for row in rows}  # of seed 0
    assert rows[0]["tokens"] == rows[0]["documents"] * (16 if scoring == "same" else 32)
    assert {"commit", "command", "device", "method", "position", "seed", "step", "config"} <= rows[0].keys()


def test_a_table_into_a_pipe_keeps_its_lines(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.cli.console.console._width", 60)
    said = succeed("lm", "perplexity", "run", "--length=32", "--device=cpu")
    assert "95 %" in next(line for line in said.splitlines() if "nats a token more" in line)


def test_another_base_is_in_the_row(trained: Path) -> None:
    succeed("lm", "perplexity", "run", "--rope-base=500000", "--length=32", "--device=cpu")
    assert list(read_rows(trained / "run/results.jsonl"))[-1]["rope_base"] == 500_000


@pytest.mark.parametrize("extra", [["--task=s-niah-1"], ["--task=s-niah-2"], ["--task=s-niah-2", "--essays=texts"]])
def test_needles_write_a_row_a_length(trained: Path, extra: list[str]) -> None:
    room = ["--length=500", "--samples=3", "--answer-tokens=4", "--device=cpu"]
    succeed("lm", "needle", "run", *extra, *room)
    row = list(read_rows(trained / "run/results.jsonl"))[-1]
    assert (row["task"], row["length"], row["samples"], row["value"]) == (extra[0][7:], 500, 3, 0)
    assert (row["depth"], row["needle_seed"]) == (None, 0)
    succeed("lm", "needle", "run", *extra, *room, "--depth=1", "--seed=2")
    again = list(read_rows(trained / "run/results.jsonl"))[-1]
    assert again["by_depth"] == [None] * 4 + [0]
    assert (again["depth"], again["needle_seed"], again["data"]) == (1, 2, row["data"])


def test_a_row_tells_the_text_that_hides_a_needle(trained: Path) -> None:
    for extra in ("--task=s-niah-1", "--task=s-niah-2", "--task=s-niah-2 --essays=texts"):
        room = ("--length=500", "--samples=1", "--answer-tokens=4", "--device=cpu")
        succeed("lm", "needle", "run", *extra.split(), *room)
    assert len({row["data"] for row in list(read_rows(trained / "run/results.jsonl"))[-3:]}) == 3


def test_heads_are_measured_on_whole_documents(trained: Path) -> None:
    said = succeed("lm", "inspect", "run", "--length=32", "--length=64", "--samples=1", "--queries=8", "--device=cpu")
    assert said.count("4 without slopes") == 2  # RoPE has none; a line a length
    rows = [row for row in read_rows(trained / "run/results.jsonl") if row["task"] == "lm-heads"]
    heads = [(1, head) for head in range(1, 5)]
    assert [(row["length"], row["layer"], row["head"]) for row in rows] == [
        (n, *head) for n in (32, 64) for head in heads
    ]
    assert all(1 <= row["support"] <= row["length"] for row in rows)
    assert all(row["tiles"] == 1 for row in rows)  # one tile, which is alive
    assert all(row["scale"] > 0 for row in rows)
    assert {(row["samples"], row["queries"]) for row in rows} == {(1, 8)}


def test_generation_goes_on_from_its_prompt(trained: Path) -> None:
    assert succeed("lm", "generate", "run", "the river", "--tokens=5", "--device=cpu").startswith("the river")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["corpus", "other"], "say where the text comes from"),
        (["corpus", "other", "--folder=absent"], "there is no folder absent"),
        (["corpus", "corpus", "--folder=texts"], "holds a corpus already"),
        (["corpus", "other", "--folder=texts", "--vocabulary=9"], "at least 258"),
        (["corpus", "other", "--folder=texts", "--validation=2"], "between 0 and 1"),
        (["corpus", "other", "--dataset=some/name"], "pip install datasets"),
        (["train", "texts"], "is not a corpus"),
        (["train", "corpus", "--preset=9b"], "there is no preset '9b'"),
        (["train", "corpus", "--method=magic"], "unknown method 'magic'"),
        (["train", "corpus", "--set=steps"], "field=value"),
        (["train", "corpus", "--context=100000"], "does not fit in"),
        (["perplexity", "run", "--length=100000"], "no document has 100000 tokens"),
        (["inspect", "run", "--length=100000"], "no document has 100000 tokens"),
        (["perplexity", "texts"], "has no checkpoint"),
        (["perplexity", "run", "--corpus=texts"], "is not a corpus"),
        (["needle", "run", "--length=40"], "40 tokens are too few"),
        (["needle", "run", "--length=500", "--answer-tokens=4", "--depth=2"], "between 0 and 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_told(
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["longspan", "lm", *arguments])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_a_corpus_of_other_tokens_is_not_taken_for_the_runs(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vocabulary of the same size says nothing about what its tokens are."""

    def refusal(*options: str) -> str:
        monkeypatch.setattr("sys.argv", ["longspan", "lm", "generate", str(run), "The", "--device=cpu", *options])
        with pytest.raises(SystemExit):
            cli.main()
        return capsys.readouterr().err.replace("\n", " ")

    run, own = tmp_path / "run", tmp_path / "corpus"
    write_texts(tmp_path / "texts", [60] * 40, seed=1)
    shutil.copytree(trained / "corpus", own)
    succeed("lm", "train", str(own), *SMALL, f"--out={run}")
    options = ("--vocabulary=300", "--validation=0.2")
    tokenizer = f"--tokenizer={own}"
    succeed("lm", "corpus", f"{tmp_path / 'like'}", f"--folder={tmp_path / 'texts'}", *options, tokenizer)
    succeed("lm", "generate", str(run), "The", "--device=cpu", f"--corpus={tmp_path / 'like'}")
    for path in (tmp_path / "texts").iterdir():
        path.write_text(path.read_text().replace("river", "ocean").replace("the", "these"))
    succeed("lm", "corpus", f"{tmp_path / 'unlike'}", f"--folder={tmp_path / 'texts'}", *options)
    assert "another tokenizer than the run's" in refusal(f"--corpus={tmp_path / 'unlike'}")
    shutil.rmtree(own)
    (tmp_path / "unlike").rename(own)
    assert "holds other tokens" in refusal()


def test_the_commands_are_listed() -> None:
    output = invoke("lm", "--help").output
    assert all(command in output for command in ("corpus", "train", "perplexity", "needle", "generate"))
