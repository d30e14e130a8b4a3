"""Which tasks there are, their streams of samples, and how a sample reads."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_tasks import GENERATIVE, NAMES

from longspan import tasks
from longspan.tasks.base import PURPOSES, stream_seed
from longspan.tasks.max_retrieval import MaxRetrieval


def test_streams_of_different_purposes_never_share_a_seed() -> None:
    seeds = {p: {stream_seed(p, seed, index) for seed in range(60) for index in range(60)} for p in PURPOSES}
    for number, purpose in enumerate(PURPOSES):
        assert len(seeds[purpose]) == 3600
        # torch's CPU generator keeps the low 32 bits only.
        assert {seed & 3 for seed in seeds[purpose]} == {number}
        assert all(0 <= seed < 2**63 for seed in seeds[purpose])
        assert max(seed.bit_length() for seed in seeds[purpose]) == 63
    assert stream_seed("train", 1) == stream_seed("train", 1, 0) != stream_seed("train", 11)
    assert stream_seed("train", 1, 12) != stream_seed("train", 11, 2)
    with pytest.raises(ValueError, match="unknown purpose 'eval'; there are train, validation, test"):
        stream_seed("eval", 0)  # type: ignore[arg-type]


def test_every_task_of_the_folder_is_found() -> None:
    assert tasks.task_names() == NAMES
    assert [task.name for task in tasks.all_tasks()] == NAMES
    assert all(task.summary and "\n" not in task.summary for task in tasks.all_tasks())
    assert MaxRetrieval.name not in tasks.task_names()
    assert [task.name for task in tasks.all_tasks() if task.metric == "exact_match"] == GENERATIVE
    lengths = {task.name: task.train_lengths for task in tasks.all_tasks()}
    assert lengths.pop("local_count") == (64, 128)
    assert lengths.pop("delayed_copy") == (256, 256)
    assert set(lengths.values()) == {(32, 64)}


def test_a_new_file_is_a_new_task(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(
        "from dataclasses import dataclass\nfrom longspan.tasks.symbols import SymbolTask\n"
        "@dataclass(frozen=True)\nclass Echo(SymbolTask):\n    name = 'echo'\n    summary = 'again'\n"
        "    def answer(self, source):\n        return source\n"
    )
    code = (
        f"from longspan import tasks; tasks.__path__.append({str(tmp_path)!r}); "
        "print(*tasks.task_names()); print(tasks.get_task('echo', num_symbols=5).sample(2, 7).tokens.shape)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "delayed_copy echo flip_flop_dense" in run.stdout
    assert "[2, 16]" in run.stdout


RENDERED = {
    "copy": ([0, 3, 34, 1, 3, 34, 2], "BOS 0 31 SEP 0 31 EOS"),
    "2back": ([0, 15, 3], "0 15 3"),
    "flip_flop_sparse": ([0, 4, 7, 3, 6, 5, 1, 7, 2], "BOS w 1 i 0 r SEP 1 EOS"),
    "mqmtar": ([0, 6, 261, 4, 7, 8, 3, 5, 6, 261, 1, 5, 7, 8, 2], "BOS 0 255 : 1 2 _ ? 0 255 SEP ? 1 2 EOS"),
}


@pytest.mark.parametrize("name", RENDERED)
def test_tokens_read_well(name: str) -> None:
    ids, text = RENDERED[name]
    assert tasks.get_task(name).render(ids) == text
