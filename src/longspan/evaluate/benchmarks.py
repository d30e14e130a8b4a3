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


class Score(NamedTuple):
    """One number of the harness."""

    benchmark: str
    metric: str
    value: float  # percent, or a perplexity
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
) -> list[Score]:
    """The scores of tasks by name; `include` is a folder with tasks of one's own, `limit` samples of each task."""
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
    return list(scores(found["results"], found["n-samples"]))


def scores(results: dict[str, dict[str, Any]], counts: dict[str, dict[str, int]]) -> Iterator[Score]:
    """What the harness found: one score a benchmark, Lambada's perplexity and each length of a needle task apart."""
    for task, numbers in results.items():
        found = {name.partition(",")[0]: value for name, value in numbers.items() if isinstance(value, float | int)}
        samples = counts.get(task, {}).get("effective", 0)
        name = _NAMES.get(task, task)
        if task == "lambada_openai":
            yield Score("lambada_perplexity", *_number(found, "perplexity"), samples, None)
            found.pop("perplexity")
        lengths = [metric for metric in found if metric.isdigit() and found[metric] >= 0]
        for length in sorted(lengths, key=int):
            percent = 100 * found[length]
            yield Score(task, "exact_string", percent, None, samples // len(lengths), int(length))
        if metric := next((metric for metric in _METRICS if metric in found), None):
            yield Score(name, *_number(found, metric), samples, None)


def _number(found: dict[str, Any], metric: str) -> tuple[str, float, float | None]:
    error = found.get(f"{metric}_stderr")
    if "perplexity" in metric:
        return "perplexity", float(found[metric]), error
    told = {"acc": "accuracy", "acc_norm": "normalised_accuracy"}.get(metric, metric)
    return told, 100 * float(found[metric]), None if error is None else 100 * float(error)


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
