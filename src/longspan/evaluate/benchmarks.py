"""Benchmarks of short contexts by lm-eval's harness, as rows beside the paper's table."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longspan.nn.llama import Llama
from longspan.paper.language import BENCHMARKS
from longspan.text.corpora import Corpus
from longspan.text.documents import CorpusError
from longspan.train.config import Precision

_NAMES = {"lambada_openai": "lambada"}  # lm-eval's to the paper's
# Where lm-eval gives several, the first of these is the one that is told. The paper does not say which is its own;
# 32.5 on HellaSwag and 28.6 on OpenBookQA look like normalised accuracies at its size.
_METRICS = ("acc_norm", "acc", "exact_match", "word_perplexity", "perplexity")
_SHARES = ("acc_norm", "acc", "exact_match")  # told in percent


class Score(NamedTuple):
    """One number of the harness."""

    benchmark: str
    metric: str
    value: float  # percent, a perplexity, or as lm-eval has it
    error: float | None  # one standard error, in the same unit
    samples: int
    length: int | None  # of a needle task

    @property
    def table(self) -> str:
        """The task of its row: that of the paper's table, where it is in it."""
        return "lm-short" if self.benchmark in BENCHMARKS else "lm-eval"


def run_benchmarks(
    model: Llama,
    corpus: Corpus,
    tasks: Sequence[str],
    *,
    precision: Precision = "float32",
    longest: int | None = None,
    limit: int | None = None,
    shots: int | None = None,
    include: Path | None = None,
    needle_lengths: Sequence[int] = (),
) -> Iterator[Score]:
    """The scores of tasks by name, see `scores`.

    Args:
        include: a folder with tasks of one's own.
        limit: samples of each task, those of all lengths together where it has several.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        from longspan.integrations.lm_eval import LongspanLM
    except ImportError as error:
        raise CorpusError(f"benchmarks need lm-eval: pip install 'longspan[lm-eval]' ({error})") from error

    with tempfile.TemporaryDirectory() as folder:
        _as_transformers_has_it(corpus, Path(folder))
        facts: dict[str, Any] = {"tokenizer": folder}
        if needle_lengths:
            facts["max_seq_lengths"] = list(needle_lengths)
        manager = TaskManager(include_path=None if include is None else str(include), metadata=facts)
        unknown = [task for task in tasks if not manager.match_tasks([task])]
        if unknown:
            raise CorpusError(f"lm-eval has no task {', '.join(unknown)}")
        reader = LongspanLM(model, corpus.tokenizer, longest=longest, precision=precision)
        found = simple_evaluate(
            reader,
            tasks=list(tasks),
            num_fewshot=shots,
            limit=limit,
            task_manager=manager,
            metadata=facts,
            log_samples=False,
            bootstrap_iters=1000,
        )
    return scores(found["results"], found["n-samples"], needle_lengths)


def scores(
    results: dict[str, dict[str, Any]], counts: dict[str, dict[str, int]], lengths: Sequence[int] = ()
) -> Iterator[Score]:
    """What the harness found: one score a benchmark where it has one of `_METRICS`, else all that it gave.

    Lambada's perplexity, each length of a needle task and each filter of an answer stand apart. Raises CorpusError at
    the end where a task gave nothing, or a needle task nothing at one of `lengths`, the ones asked for.
    """
    missing = []
    for task, numbers in results.items():
        by_filter = _by_filter(numbers)
        samples = counts.get(task, {}).get("effective", 0)
        if task in counts and not by_filter:  # a group of tasks may have no number of its own
            missing.append(f"{task} gave no number")
        for way, found in by_filter.items():
            suffix = f",{way}" if len(by_filter) > 1 else ""
            if task == "lambada_openai":
                yield Score("lambada_perplexity", *_number(found, "perplexity"), samples, None)
                found.pop("perplexity")
            measured = [int(metric) for metric in found if metric.isdigit() and found[metric] >= 0]
            for length in sorted(measured):
                percent = 100 * found[str(length)]
                yield Score(task, "exact_string", percent, None, samples // len(measured), length)
            if any(metric.isdigit() for metric in found):
                said = f"{task} had no sample of {{}} tokens (a limit counts those of all lengths together)"
                missing += [said.format(length) for length in lengths if length not in measured]
            for metric in _chosen(found):
                told, value, error = _number(found, metric)
                yield Score(_NAMES.get(task, task), told + suffix, value, error, samples, None)
    if missing:
        raise CorpusError("; ".join(missing))


def _by_filter(numbers: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The numbers of a task by the filter of the answers, then by metric; lm-eval names them METRIC,FILTER."""
    found: dict[str, dict[str, float]] = {}
    for name, value in numbers.items():
        metric, comma, way = name.partition(",")
        if comma and isinstance(value, float | int):
            found.setdefault(way, {})[metric] = value
    return found


def _chosen(found: dict[str, float]) -> list[str]:
    """The first of the metrics that we know, or all of a task that has none of them."""
    known = [metric for metric in _METRICS if metric in found]
    others = [metric for metric in found if not metric.isdigit() and not metric.endswith("_stderr")]
    return known[:1] or others


def _number(found: dict[str, float], metric: str) -> tuple[str, float, float | None]:
    error = found.get(f"{metric}_stderr")
    unit = 100 if metric in _SHARES else 1
    told = {"acc": "accuracy", "acc_norm": "normalised_accuracy"}.get(metric, metric)
    return told, unit * float(found[metric]), None if error is None else unit * float(error)


def _as_transformers_has_it(corpus: Corpus, folder: Path) -> None:
    """The tokenizer where lm-eval's needle tasks, which count tokens, can load it from."""
    shutil.copy(corpus.folder / "tokenizer.json", folder)
    mark = corpus.tokenizer.backend.id_to_token
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": mark(corpus.tokenizer.begin),
        "eos_token": mark(corpus.tokenizer.end),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
