"""The commands from a name to a row in a table, and what they say when something is wrong."""

import csv
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tiny_runs import TINY_EDITS, log_of
from typer.testing import CliRunner, Result

from longspan import cli, plots
from longspan.cli.console import console
from longspan.paper.recipes import recipe_names
from longspan.results import append_rows, read_rows
from longspan.tasks import task_names
from longspan.train import checkpoint as checkpoints


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli.app, list(args), catch_exceptions=False)


def succeed(*args: str) -> str:
    result = invoke(*args)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with one run, trained and measured; the commands run in it."""
    folder = tmp_path_factory.mktemp("cli")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        succeed("train", "copy", "--smoke", "--seed=2", "--device=cpu", *TINY_EDITS, "--set=steps=5", "--out=runs/one")
        succeed("evaluate", "runs/one", "--device=cpu")
        yield folder


def test_train_makes_a_run_under_a_name_that_tells_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    edits = ["--set=steps=5", "--set=batch=4", "--set=validate_samples=4"]
    output = succeed("train", "copy", "--method=entmax", "--position=rope", "--smoke", *edits, "--device=cpu")
    name = "longspan-copy-rope-entmax-smoke+steps=5+batch=4+validate_samples=4-s0"
    assert f"finished at step 5: runs/{name}" in output
    config = json.loads((tmp_path / "runs" / name / "config.json").read_text())
    assert config["name"] == "longspan/copy/rope/entmax/smoke+steps=5+batch=4+validate_samples=4"
    assert (config["steps"], config["model"]["attention"]["method"]) == (5, "entmax")
    assert len(log_of(tmp_path / "runs" / name, "finished")) == 1


def test_a_whole_recipe_name_is_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    succeed("train", "paper/sort/nope/softmax", "--smoke", *TINY_EDITS, "--set=steps=1", "--out=run", "--device=cpu")
    assert json.loads(Path("run/config.json").read_text())["task"] == "sort"


def test_evaluate_writes_a_row_a_length_and_measures_none_twice(trained: Path) -> None:
    rows = list(read_rows(trained / "runs/one/results.jsonl"))
    assert [(row["length"], row["samples"], row["seed"]) for row in rows] == [(6, 20, 2), (12, 20, 2)]
    output = succeed("evaluate", "runs/one", "--device=cpu")
    assert output.strip() == "rows: runs/one/results.jsonl"
    succeed("evaluate", "runs/one", "--length=6", "--samples=25", "--checkpoint=last", "--device=cpu")
    succeed("evaluate", "runs/one", "--length=6", "--again", "--device=cpu")
    rows = list(read_rows(trained / "runs/one/results.jsonl"))
    assert [(row["length"], row["samples"]) for row in rows] == [(6, 20), (12, 20), (6, 25), (6, 20)]


def test_an_interrupted_evaluation_keeps_what_it_has(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan.evaluate import ladder

    measure = ladder.measure

    def interrupted(model: object, task: object, length: int, *args: object, **options: object) -> object:
        if length == 9:
            raise KeyboardInterrupt
        return measure(model, task, length, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ladder, "measure", interrupted)
    result = invoke("evaluate", "runs/one", "--length=8", "--length=9", "--length=10", "--device=cpu")
    assert result.exit_code == 130
    assert "What was measured is kept" in result.output
    lengths = [row["length"] for row in read_rows(trained / "runs/one/results.jsonl")]
    assert 8 in lengths
    assert not {9, 10} & set(lengths)


@pytest.mark.parametrize("length", [-2, -1, 0])  # -2 is a width of 0 tokens, which a batch cannot be filled with
def test_every_length_is_looked_at_before_one_is_measured(trained: Path, length: int) -> None:
    before = (trained / "runs/one/results.jsonl").read_text()
    with pytest.raises(ValueError, match=f"copy: length {length} is too short"):
        invoke("evaluate", "runs/one", "--length=7", f"--length={length}", "--device=cpu")
    assert (trained / "runs/one/results.jsonl").read_text() == before


def test_the_table_shows_a_smoke_run_below_the_papers_lines(trained: Path) -> None:
    output = succeed("table", "copy")
    main, _, small = output.partition("Smoke runs")
    assert "86.6" in main
    assert "longspan/smoke" not in main
    assert "4096" in main.splitlines()[1]
    assert "longspan/smoke+model.layers=1" in small
    heading = next(line for line in small.splitlines() if "position" in line)
    assert heading.split()[:4] == ["position", "method", "recipe", "6"]
    assert "note: The Entmax row of Copy" in output


def test_the_table_as_markdown_and_as_csv(trained: Path) -> None:
    assert "\nSmoke runs\n\n| position | method | source | 6 |" in succeed("table", "main/copy", "--markdown")
    cells = list(csv.DictReader(succeed("table", "copy", "--csv").splitlines()))
    ours = [cell for cell in cells if cell["source"] != "published"]
    assert {(cell["position"], cell["method"], cell["seeds"]) for cell in ours} == {("nape", "asentmax", "1")}
    assert len(cells) > 100


def test_the_table_without_runs_is_the_papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = succeed("table", "mqmtar")
    assert "95.3" in output
    assert "Smoke" not in output


def test_the_ladder_is_drawn(trained: Path) -> None:
    assert "written: ladder.png" in succeed("figure", "ladder", "copy")
    assert Path("ladder.png").read_bytes().startswith(b"\x89PNG")


def test_every_line_of_the_ladder_has_a_label_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [("nape", "softmax"), ("rope", "softmax"), ("nape", "entmax"), ("nape", "adaptive_temperature")]
    rows = [
        {"task": "copy", "recipe": f"longspan/copy/{position}/{method}", "length": 64, "value": 9.0, "seed": 0}
        for position, method in cells
    ]
    append_rows(tmp_path / "rows.jsonl", [{**row, "time": "now"} for row in rows])
    drawn: list[plots.Panel] = []
    monkeypatch.setattr(plots, "draw", lambda panels, path: drawn.extend(panels))
    succeed("figure", "ladder", "copy", f"--rows={tmp_path}", f"--out={tmp_path / 'x.png'}")
    labels = {f"{method}, {position}, longspan" for position, method in cells}
    assert set(drawn[0].curves) == labels
    assert labels - set(drawn[0].dotted) == {"adaptive_temperature, nape, longspan"}


def test_tasks_are_listed_and_shown() -> None:
    listed = succeed("tasks")
    for name in [*task_names(), "max_retrieval"]:
        assert name in listed
        output = succeed("tasks", "show", name, "--length=32")
        assert output.startswith(f"{name}: ")
        assert "reads" in output
        assert "wanted" in output
    assert succeed("tasks", "show", "copy", "--seed=1") != succeed("tasks", "show", "copy", "--seed=2")


def test_what_is_listed_keeps_its_lines_on_a_narrow_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = [succeed("recipes", "copy/nope"), succeed("tasks", "show", "copy")]
    monkeypatch.setattr(console, "width", 20)
    assert [succeed("recipes", "copy/nope"), succeed("tasks", "show", "copy")] == wide
    assert wide[1].count("\n") == 3


def test_recipes_are_listed() -> None:
    assert succeed("recipes").split() == recipe_names()
    found = succeed("recipes", "copy/nope").split()
    assert len(found) == 20
    assert "paper/copy/nope/stick_breaking" in found


WRONG = {
    "task": (["train", "copyy"], "there is no recipe 'longspan/copyy/nape/asentmax'"),
    "method": (["train", "copy", "--method=hardmax"], "there is no recipe"),
    "recipe-and-method": (["train", "paper/copy/nape/entmax", "--method=softmax"], "is a whole recipe"),
    "max-retrieval": (["train", "max_retrieval"], "`longspan demo` trains and measures it"),
    "markup": (["train", "[/bold]"], "there is no recipe"),
    "edit-form": (["train", "copy", "--set", "steps"], "--set takes field=value, got 'steps'"),
    "edit-field": (["train", "copy", "--set", "stepz=3"], "there is no field 'stepz'"),
    "edit-value": (["train", "copy", "--set", "steps=many"], "steps must be int, got 'many'"),
    "edit-range": (["train", "copy", "--smoke", "--set", "steps=0", "--out=x"], "steps must be at least 1, got 0"),
    "device": (["train", "copy", "--smoke", "--device=warp"], "there is no device 'warp'"),
    "device-without-numbers": (["train", "copy", "--smoke", "--device=meta"], "there is no device 'meta'"),
    "seed": (["train", "copy", "--seed=-1"], "greater than or equal to 0"),
    "option": (["train", "copy", "--stepz=3"], "No such option"),
    "no-argument": (["train"], "Missing argument"),
    "no-command": (["trian"], "No such command 'trian'"),
    "run": (["evaluate", "nowhere"], "'nowhere' does not exist"),
    "no-checkpoint": (["evaluate", "."], "has no checkpoint"),
    "checkpoint": (["evaluate", ".", "--checkpoint=worst"], "'worst' is not one of"),
    "table": (["table", "copyy", "--rows=."], "the paper has no table 'copyy'"),
    "rows": (["table", "copy", "--rows=nowhere"], "'nowhere' does not exist"),
    "no-rows": (["figure", "ladder", "copy", "--rows=."], "there are no result rows of copy"),
    "shown-task": (["tasks", "show", "copyy"], "unknown task 'copyy'"),
    "length": (["tasks", "show", "mqmtar", "--length=3"], "fewer than the 4 queries"),
    "odd-rows": (["table", "copy", "--rows=odd.rows"], "odd.rows, line 1: not a JSON row"),
    "odd-config": (["train", "copy", "--smoke", "--out=odd"], "odd/config.json: not an object of JSON"),
    "cut-config": (["collect", "cut"], "cut/config.json: Expecting"),
    "folder": (["train", "copy", "--smoke", "--device=cpu", "--out=file/run"], "file/run"),
    "sweep": (["sweep", "copy", "--methods", "softmax", "hardmax"], "there is no recipe"),
}


_TRAIN = ["train", "copy", "--smoke", *TINY_EDITS, "--out=other", "--device=cpu"]
MISSING = {
    "train": ("safetensors", _TRAIN),
    "train-numpy": ("numpy", _TRAIN),
    "ladder": ("matplotlib", ["figure", "ladder", "copy", "--out=other/x.png"]),
    "demo": ("matplotlib", ["demo", "--steps=1", "--method=top-2", "--out=other"]),
    "probe": ("matplotlib", ["probe", "transformation", "--out=other"]),
    "inspect": ("matplotlib", ["inspect", "runs/one", "--out=other"]),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_missing_package_is_named_before_any_work(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    module, args = MISSING[case]
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", ["longspan", *args])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert f"needs {module}: pip install 'longspan[cli,train,plots]'" in capsys.readouterr().err
    assert not Path("other").exists()


def left_with(args: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of a command as it is typed."""
    monkeypatch.setattr(sys, "argv", ["longspan", *args])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code


def test_an_import_that_breaks_without_a_name_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str) -> None:
        raise ModuleNotFoundError("a part of it could not be imported")

    module = ModuleType("longspan.integrations.transformers.runs")
    module.__dict__["__getattr__"] = broken
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert left_with(["export", ".", "out"], monkeypatch) == 2
    assert capsys.readouterr().err == "error: a part of it could not be imported\n"


def test_errors_are_no_part_of_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text("[1]\n{}\n")
    assert left_with(["table", "copy", f"--rows={tmp_path}", "--csv"], monkeypatch) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "line 1: not a JSON row" in printed.err


@pytest.mark.parametrize(
    ("args", "shown"), [(["probe"], b"?"), (["table", "copy"], b"9.5?0.7")], ids=["probe", "table"]
)
def test_a_screen_without_some_letters_has_the_others(
    args: list[str], shown: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"task": "copy", "recipe": "longspan/copy/nape/softmax", "length": 64}
    append_rows(tmp_path / "runs" / "rows.jsonl", [{**row, "seed": seed, "value": 9.0 + seed} for seed in range(2)])
    monkeypatch.chdir(tmp_path)
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii", write_through=True))
    assert not left_with(args, monkeypatch)
    assert shown in printed.getvalue()


def test_a_row_that_lacks_something_is_told_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"task": "copy", "length": 64, "value": 9.0, "position": "nape", "method": "softmax"}
    append_rows(tmp_path / "rows.jsonl", [{**row, "recipe": None, "seed": 0}])
    table = ["table", "copy", f"--rows={tmp_path}", "--csv"]
    for options in ([], ["--chosen"]):
        assert not left_with([*table, *options], monkeypatch)
        assert "nape,softmax,unnamed,64,9.00" in capsys.readouterr().out
    append_rows(tmp_path / "rows.jsonl", [{**row, "recipe": "longspan/copy/nape/softmax"}])
    assert left_with(table, monkeypatch) == 2
    assert "'seed' is missing in a row that was read (report.py looks for it)" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "other"), [("evaluate", "lm perplexity"), ("inspect", "lm inspect")])
def test_a_language_model_has_commands_of_its_own(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    command: str, other: str,
) -> None:  # fmt: skip
    loaded = checkpoints.load(checkpoints.of_run(trained / "runs/one"))
    checkpoints.save(tmp_path / "best", replace(loaded, config={"corpus": "text", "activations": "none"}), keep=1)
    assert left_with([command, str(tmp_path), "--device=cpu"], monkeypatch) == 2
    said = capsys.readouterr().err
    assert "is the run of a language model" in said
    assert f"`longspan {other}`" in said


def test_tensorboard_gets_the_numbers_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scalars = []

    class Writer:
        def __init__(self, folder: str):
            assert folder == str(tmp_path / "run" / "events")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars.append((name, step))

        def close(self) -> None:
            scalars.append(("closed", 0))

    train = ["train", "copy", "--smoke", *TINY_EDITS, "--set=steps=5", "--device=cpu", "--tensorboard"]
    train += [f"--out={tmp_path / 'run'}"]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    result = invoke(*train)
    assert result.exit_code == 2
    assert "--tensorboard needs tensorboard" in result.output
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    succeed(*train)
    assert {("train/loss", 5), ("train/steps_per_second", 5), ("validate/6", 5), ("closed", 0)} <= set(scalars)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_gets_a_message_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    args, message = WRONG[case]
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("in the way")
    Path("odd.rows").write_text("[1]\n5\n")
    for name, text in (("odd", "[1]"), ("cut", '{"task": ')):
        Path(name).mkdir()
        Path(name, "config.json").write_text(text)
    monkeypatch.setattr(sys, "argv", ["longspan", *args])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    printed = capsys.readouterr()
    text = " ".join((printed.out + printed.err).replace("│", " ").split())
    assert message in text
    assert "Traceback" not in text
