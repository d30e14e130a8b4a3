"""The script that trains and measures several language models: it stops at any moment and goes on."""

import importlib.util
import re
import signal
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_text import tiny_corpus

from longspan.cli import lm_inspect, lm_measure, lm_tune
from longspan.language_report import language_lines
from longspan.paper.language import LANGUAGE_TABLES
from longspan.results import append_rows, read_rows
from longspan.text.corpora import Corpus
from longspan.train import checkpoint as checkpoints

SCRIPT = Path(__file__).parents[1] / "benchmarks/language_models.py"
NAPE = ["train", "perplexity", "heads", "tune", "s-niah-1", "s-niah-2"]
ADJUSTED = "rope_base=500000"
HEADS = 2 * 4  # layers and heads of the smallest preset
ROPE = [
    "train", "perplexity", f"perplexity {ADJUSTED}", "heads",
    "tune", "s-niah-1", "s-niah-2", f"s-niah-1 {ADJUSTED}", f"s-niah-2 {ADJUSTED}",
]  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return tiny_corpus(tmp_path_factory.mktemp("models"))


@pytest.fixture
def script() -> ModuleType:
    specification = importlib.util.spec_from_file_location("language_models", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


class Command:
    """The command with small settings, in a folder; a call returns what it printed."""

    def __init__(
        self, script: ModuleType, corpus: Corpus, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        self.script, self.corpus, self.folder, self.monkeypatch, self.capsys = (
            script, corpus.folder, folder, monkeypatch, capsys
        )  # fmt: skip
        monkeypatch.chdir(folder)

    def given(self, *options: str) -> Any:
        settings = ["--preset=tiny", "--steps=2", "--context=360", "--samples=2", "--tuning-steps=2", "--shortest=350"]
        settings += ["--tuning-samples=4", "--device=cpu", "--models", "asentmax/nape", "--lengths", "360", "400"]
        self.monkeypatch.setattr("sys.argv", [str(SCRIPT), str(self.corpus), *settings, *options])
        return self.script.arguments()

    def __call__(self, *options: str) -> str:
        self.given(*options)
        try:
            self.script.main()
        finally:
            self.said = self.capsys.readouterr().out
        return self.said

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / "lm" / name
        return list(read_rows(path)) if path.exists() else []

    def ended(self) -> list[str]:
        return [row["stage"] for row in self.rows("logs.jsonl") if row["event"] == "stage" and row["ended"]]


@pytest.fixture
def command(
    script: ModuleType,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    return Command(script, corpus, tmp_path, monkeypatch, capsys)


def test_every_stage_leaves_its_rows_and_its_time(command: Command) -> None:
    said = command("--models", "asentmax/nape", "softmax/rope")
    told = re.findall(r"^(\S+/\S+): (.*) took \d+\.\d s$", said, re.MULTILINE)
    assert told == [("asentmax/nape", stage) for stage in NAPE] + [("softmax/rope", stage) for stage in ROPE]
    assert command.ended() == [*NAPE, *ROPE]
    losses = [row for row in command.rows("logs.jsonl") if row["event"] == "train"]
    assert {row["recipe"] for row in losses} == {"lm/tiny/nape/asentmax", "lm/tiny/rope/softmax"}
    rows = command.rows("results.jsonl")
    heads = [row for row in rows if row["task"] == "lm-heads"]
    assert len(heads) == 2 * 2 * HEADS  # lengths; models
    assert len(rows) - len(heads) == 2 * (1 + 2) * (1 + 2)  # lengths; models and bases; perplexity and two tasks
    for name, tables in (("lm-perplexity", 1), ("lm-needles", 2)):
        found = [line for table in LANGUAGE_TABLES[name] for line in language_lines(rows, table)]
        ours = [(line.position, line.method) for line in found if line.source != "paper" and line.cells]
        assert ours.count(("nape", "asentmax")) == ours.count(("rope+abf", "softmax")) == tables
    again = command("--models", "asentmax/nape", "softmax/rope")
    assert again.count("measured before") == 2
    assert command.rows("results.jsonl") == rows


def test_a_stop_in_any_stage_goes_on_with_that_stage(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    stages = ((lm_measure, "perplexity"), (lm_inspect, "inspect"), (lm_tune, "tune"), (lm_measure, "needle"))
    for number, (place, at) in enumerate(stages):
        with monkeypatch.context() as patch:
            patch.setattr(place, at, _interrupted)
            with pytest.raises(SystemExit) as ended:
                command()
        assert ended.value.code == 130
        assert "the same command goes on" in command.said
        done += [*NAPE[number : number + 1], "train"] if number else ["train"]
        assert sorted(command.ended()) == sorted(done)
        assert len(command.rows("results.jsonl")) == 2 * (number > 0) + 2 * HEADS * (number > 1)
    command()
    assert len(command.rows("results.jsonl")) == 6 + 2 * HEADS
    assert set(command.ended()) == set(NAPE)
    assert command.ended().count("perplexity") == command.ended().count("tune") == 1
    # A training that ended is looked at by every call, and its log was taken over once.
    assert [row["step"] for row in command.rows("logs.jsonl") if row["event"] == "train"] == [2]


def _interrupted(*given: object, **options: object) -> None:
    raise KeyboardInterrupt


def test_a_training_saves_and_stops_before_the_time_is_over(command: Command) -> None:
    said = command("--steps=100000", "--minutes=0.2")  # it would take hours, and a busy machine must get to its start
    assert "the time is over" in said
    assert "train stopped after" in said
    (saved,) = checkpoints.saved(command.folder / "runs/lm-tiny-nape-asentmax-s0/checkpoints")
    (stage,) = [row for row in command.rows("logs.jsonl") if row["event"] == "stage"]
    assert (stage["stage"], stage["ended"]) == ("train", False)
    assert 0 < checkpoints.step_of(saved) < 100_000


def test_a_measurement_is_cut_before_the_time_is_over(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def dawdle(*given: object, **options: object) -> None:
        for _ in range(6000):
            time.sleep(0.01)

    monkeypatch.setattr(lm_measure, "perplexity", dawdle)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a shell
    try:
        said = command("--minutes=0.4")
    finally:
        signal.signal(signal.SIGINT, before)
    assert "perplexity stopped after" in said
    assert "the time is over" in said


def write_stages(command: Command, seconds: float) -> None:
    """As if a model had been measured with the settings of the command."""
    given = command.given()
    stage = {"event": "stage", "ended": True, "seconds": seconds, "recipe": "lm/tiny/nape/asentmax", "seed": 0}
    stage |= {name: getattr(given, name) for name in command.script.SETTINGS}
    append_rows(command.folder / "lm/logs.jsonl", [stage | {"stage": name} for name in NAPE])


def test_what_would_not_end_in_time_is_not_begun(command: Command) -> None:
    write_stages(command, 50)
    given = command.given("--models", "asentmax/nape", "softmax/nape")
    clock = iter([360.0, *[299.0] * 9])
    command.script.run_all(given, lambda: next(clock))
    said = command.capsys.readouterr().out
    assert "asentmax/nape: measured before" in said
    assert "softmax/nape: not begun, the longest so far took 300 s and 299 s are left" in said
    assert not (command.folder / "runs").exists()
    clock = iter([360.0, 310.0, *[49.0] * 9])
    command.script.run_all(given, lambda: next(clock))
    assert "perplexity not begun, it takes up to 50 s and 49 s are left" in command.capsys.readouterr().out


def test_rows_of_other_settings_are_not_taken_for_these(command: Command) -> None:
    write_stages(command, 1)
    for options in (), ("--steps=3",), ("--tuning-steps=3",), ("--lengths", "360"), ("--seed=1",):
        done = command.script.Book(command.given(*options)).done("asentmax/nape")
        assert done == (set() if options else set(NAPE))


def test_what_was_measured_on_another_corpus_is_not_done(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stages(command, 1)  # rows that do not tell a corpus
    book = command.script.Book(command.given())
    assert book.done("asentmax/nape") == set(NAPE)
    (command.folder / "lm/logs.jsonl").unlink()
    for stage in command.script.stages_of(book.given, "asentmax/nape", set())[1:]:  # a training has a log to take over
        book.note("asentmax/nape", stage, 1.0, ended=True)
    assert book.done("asentmax/nape") == set(NAPE[1:])
    monkeypatch.setattr(Corpus, "checksum", "0123456789ab")
    assert command.script.Book(command.given()).done("asentmax/nape") == set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "360", "100000"], "no document has 100000 tokens"),
        (["--lengths", "100", "400"], "100 tokens are too few"),
        (["--shortest=361"], "more than the context of 360"),
    ],
    ids=["no-long-document", "no-room-for-the-question", "short-context"],
)
def test_what_cannot_be_measured_is_told_before_a_training(command: Command, options: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        command(*options)
    assert not (command.folder / "runs").exists()
