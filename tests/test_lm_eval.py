"""lm-eval's harness on our models: tasks of our own on local data, each number computed again by hand."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")  # of lm-eval's and its dependencies' own making

from test_cli import succeed  # noqa: E402
from test_lm_model import model  # noqa: E402
from tiny_text import WORDS, tiny_corpus  # noqa: E402

from longspan import cli  # noqa: E402
from longspan.evaluate.benchmarks import Score, run_benchmarks, scores  # noqa: E402
from longspan.integrations.lm_eval import LongspanLM, TooLong  # noqa: E402
from longspan.nn.llama import Llama  # noqa: E402
from longspan.results import read_rows  # noqa: E402
from longspan.text.corpora import Corpus  # noqa: E402
from longspan.text.documents import CorpusError  # noqa: E402

DOCS: list[dict[str, Any]] = [
    {"start": "the old river", "end": " sings slowly", "choices": [" sings", " walks under the light"], "label": 0},
    {"start": "a stone walks under", "end": " the light", "choices": [" light", " and"], "label": 1},
    {"start": "when", "end": " 42", "choices": [" the", " a stone"], "label": 0},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: {kind}
"""
TASKS = {
    "our_endings": (
        "loglikelihood",
        "doc_to_text: '{{start}}'\ndoc_to_target: '{{end}}'\ntarget_delimiter: ''\n"
        "metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}, {metric: acc}]",
    ),
    "our_choices": (
        "multiple_choice",
        "doc_to_text: '{{start}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: label\ntarget_delimiter: ''\n"
        "metric_list: [{metric: acc}, {metric: acc_norm}]",
    ),
    "our_texts": (
        "loglikelihood_rolling",
        "doc_to_text: ''\ndoc_to_target: '{{start}}{{end}}'\n"
        "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]",
    ),
    "our_answers": (
        "generate_until",
        "doc_to_text: '{{start}}'\ndoc_to_target: '{{end}}'\n"
        "generation_kwargs: {until: ['zzz'], max_gen_toks: 5, do_sample: false}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]",
    ),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return tiny_corpus(tmp_path_factory.mktemp("lm_eval"))


@pytest.fixture(autouse=True)
def only_our_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's own index of 10,000 tasks takes seconds to build."""
    import lm_eval.tasks

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(lm_eval.tasks.TaskManager, include_defaults=False))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    for name, (kind, rest) in TASKS.items():
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, kind=kind, data=data) + rest + "\n")
    return folder


@pytest.fixture
def reader(corpus: Corpus) -> LongspanLM:
    return LongspanLM(llama(), corpus.tokenizer)


def llama() -> Llama:
    return model("asentmax", vocabulary=300).float()


def likelihood(net: Llama, corpus: Corpus, context: str, continuation: str) -> tuple[float, bool]:
    """One text, no padding, every logit."""
    ids = [corpus.tokenizer.begin, *corpus.tokenizer.encode(context + continuation)]
    scored = len(ids) - 1 - len(corpus.tokenizer.encode(context))
    logits = net(torch.tensor([ids[:-1]]))[0, -scored:].log_softmax(-1)
    targets = torch.tensor(ids[-scored:])
    return float(logits[range(scored), targets].sum()), bool((logits.argmax(-1) == targets).all())


def asked(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


def test_likelihoods_in_batches_are_those_of_single_texts(reader: LongspanLM, corpus: Corpus) -> None:
    pairs = [(doc["start"], doc["end"]) for doc in DOCS] + [("", "the river sings"), ("the river ", "sings")]
    found = reader.loglikelihood([asked(*pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        moved = context[len(context.rstrip()) :]  # a blank at the end belongs to the word behind it
        expected = likelihood(reader.model, corpus, context.rstrip(), moved + continuation)
        assert value == pytest.approx(expected[0], rel=1e-4)
        assert greedy == expected[1]


def test_the_greedy_continuation_is_told_as_such(reader: LongspanLM) -> None:
    context = reader.tok_encode("the old river")
    best = reader.model(torch.tensor([context]))[0, -1].argmax().item()
    right, wrong = reader._loglikelihood_tokens([(("", ""), context, [best]), (("", ""), context, [(best + 1) % 300])])
    assert right[1]
    assert not wrong[1]
    assert right[0] > wrong[0]


def test_rolling_reads_whole_texts_or_windows(corpus: Corpus, reader: LongspanLM) -> None:
    text = " ".join(doc["start"] + doc["end"] for doc in DOCS)
    ids = corpus.tokenizer.encode(text)
    (whole,) = reader.loglikelihood_rolling([asked(text)], disable_tqdm=True)
    assert whole == pytest.approx(likelihood(reader.model, corpus, "", text)[0], rel=1e-4)
    (cut,) = LongspanLM(reader.model, corpus.tokenizer, longest=8).loglikelihood_rolling([asked(text)])
    windows = [[corpus.tokenizer.begin, *ids[:8]]] + [ids[start - 1 : start + 8] for start in range(8, len(ids) - 7, 8)]
    if rest := len(ids) % 8:
        windows.append(ids[-9:])
    expected = 0.0
    for number, window in enumerate(windows):
        scored = rest if rest and number == len(windows) - 1 else 8
        logits = reader.model(torch.tensor([window[:-1]]))[0, -scored:].log_softmax(-1)
        expected += float(logits[range(scored), window[-scored:]].sum())
    assert cut == pytest.approx(expected, rel=1e-4)


def test_generation_stops_at_a_stop_string(reader: LongspanLM, corpus: Corpus) -> None:
    greedy = {"until": [], "max_gen_toks": 12, "do_sample": False}
    prompts = ["the old river", "when"]
    whole = reader.generate_until([asked(prompt, greedy) for prompt in prompts])
    for prompt, said in zip(prompts, whole, strict=True):
        ids = [corpus.tokenizer.begin, *corpus.tokenizer.encode(prompt)]
        for _ in range(12):
            ids.append(int(reader.model(torch.tensor([ids]))[0, -1].argmax()))
        tail = ids[1 + len(corpus.tokenizer.encode(prompt)) :]
        tail = tail[: tail.index(corpus.tokenizer.end)] if corpus.tokenizer.end in tail else tail
        assert said == corpus.tokenizer.decode(tail)
    stop = whole[0][2:4]
    (cut,) = reader.generate_until([asked(prompts[0], {**greedy, "until": ["absent", stop]})])
    assert cut == whole[0][: whole[0].find(stop)]


def test_a_continuation_that_a_token_swallows_is_scored_by_itself(reader: LongspanLM, corpus: Corpus) -> None:
    encode = corpus.tokenizer.encode
    start, end = next(
        (word[:cut], word[cut:]) for word in WORDS for cut in range(1, len(word)) if swallowed(encode, word, cut)
    )
    ((value, _),) = reader.loglikelihood([asked(start, end)], disable_tqdm=True)
    ids = [corpus.tokenizer.begin, *encode(start), *encode(end)]
    scored = len(encode(end))
    logits = reader.model(torch.tensor([ids[:-1]]))[0, -scored:].log_softmax(-1)
    assert value == pytest.approx(float(logits[range(scored), ids[-scored:]].sum()), rel=1e-4)


@pytest.mark.parametrize("context", ["the old", ""])
def test_an_empty_continuation_is_told_before_any_is_read(reader: LongspanLM, context: str) -> None:
    with pytest.raises(ValueError, match=f"nothing to score: '' after '{context}'"):
        reader.loglikelihood([asked("the", " river"), asked(context, "")], disable_tqdm=True)


def swallowed(encode: Callable[[str], list[int]], word: str, cut: int) -> bool:
    return len(encode(word)) <= len(encode(word[:cut]))


def test_nothing_is_cut_silently(reader: LongspanLM, corpus: Corpus) -> None:
    short = LongspanLM(reader.model, corpus.tokenizer, longest=6)
    with pytest.raises(TooLong, match=r"has \d+ tokens, the limit is 6"):
        short.loglikelihood([asked("the old river sings", " slowly under the light")], disable_tqdm=True)
    with pytest.raises(TooLong, match="nothing is cut"):
        short.generate_until([asked("the", {"until": [], "max_gen_toks": 20, "do_sample": False})])
    with pytest.raises(ValueError, match="generation is greedy"):
        reader.generate_until([asked("the", {"until": [], "do_sample": True, "temperature": 1.0})])
    with pytest.raises(ValueError, match="at least 2"):
        LongspanLM(reader.model, corpus.tokenizer, longest=1)


def test_the_harness_runs_all_four_kinds(corpus: Corpus, tasks: Path) -> None:
    net = llama()
    found = {score.benchmark: score for score in run_benchmarks(net, corpus, list(TASKS), include=tasks)}
    ends = [likelihood(net, corpus, doc["start"], doc["end"]) for doc in DOCS]
    assert found["our_endings"].metric == "accuracy"
    assert found["our_endings"].value == pytest.approx(100 * sum(greedy for _, greedy in ends) / 3)
    right = 0
    for doc in DOCS:
        each = [likelihood(net, corpus, doc["start"], choice)[0] / len(choice) for choice in doc["choices"]]
        right += each.index(max(each)) == doc["label"]
    assert found["our_choices"].metric == "normalised_accuracy"
    assert found["our_choices"].value == pytest.approx(100 * right / 3)
    texts = [doc["start"] + doc["end"] for doc in DOCS]
    total = sum(likelihood(net, corpus, "", text)[0] for text in texts)
    words = sum(len(text.split()) for text in texts)
    assert found["our_texts"].metric == "word_perplexity"
    assert found["our_texts"].value == pytest.approx(math.exp(-total / words), rel=1e-3)
    assert (found["our_answers"].metric, found["our_answers"].samples) == ("exact_match", 3)


def test_scores_carry_the_papers_names() -> None:
    results: dict[str, dict[str, Any]] = {
        "lambada_openai": {"alias": "x", "perplexity,none": 50.0, "perplexity_stderr,none": 2.0, "acc,none": 0.3},
        "hellaswag": {"acc,none": 0.28, "acc_norm,none": 0.32, "acc_norm_stderr,none": 0.01},
        "niah_single_1": {"4096,none": 0.5, "8192,none": 0.25, "16384,none": -1},
    }
    counts = {name: {"effective": 10} for name in results}
    assert list(scores(results, counts)) == [
        Score("lambada_perplexity", "perplexity", 50.0, 2.0, 10, None),
        Score("lambada", "accuracy", 30.0, None, 10, None),
        Score("hellaswag", "normalised_accuracy", 32.0, 1.0, 10, None),
        Score("niah_single_1", "exact_string", 50.0, None, 5, 4096),
        Score("niah_single_1", "exact_string", 25.0, None, 5, 8192),
    ]
    assert [score.table for score in scores(results, counts)] == ["lm-short"] * 3 + ["lm-eval"] * 2


def test_a_task_with_other_metrics_or_filters_has_them_all() -> None:
    results: dict[str, dict[str, Any]] = {
        "summaries": {"name": "summaries", "sample_len": 4, "f1,none": 0.5, "f1_stderr,none": 0.1, "bleu,none": 12.0},
        "gsm8k": {"exact_match,strict-match": 0.05, "exact_match,flexible-extract": 0.2},
        "texts": {"word_perplexity,none": 9.0, "word_perplexity_stderr,none": "N/A", "bits_per_byte,none": 1.5},
        "a_group": {"alias": "a group"},
    }
    counts = {name: {"effective": 4} for name in results if name != "a_group"}
    assert list(scores(results, counts)) == [
        Score("summaries", "f1", 0.5, 0.1, 4, None),
        Score("summaries", "bleu", 12.0, None, 4, None),
        Score("gsm8k", "exact_match,strict-match", 5.0, None, 4, None),
        Score("gsm8k", "exact_match,flexible-extract", 20.0, None, 4, None),
        Score("texts", "word_perplexity", 9.0, None, 4, None),
    ]


def test_what_was_asked_for_and_not_measured_is_told_behind_the_rest() -> None:
    results: dict[str, dict[str, Any]] = {
        "odd": {"name": "odd", "alias": "odd", "sample_len": 0},
        "niah_single_1": {"4096,none": 0.5, "8192,none": -1, "16384,none": -1},
    }
    found = scores(results, {name: {"effective": 10} for name in results}, [4096, 8192])
    assert next(found) == Score("niah_single_1", "exact_string", 50.0, None, 10, 4096)
    with pytest.raises(CorpusError, match="odd gave no number; niah_single_1 had no sample of 8192 tokens"):
        next(found)


def test_the_command_writes_rows_and_says_what_is_wrong(
    corpus: Corpus,
    tasks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    succeed("lm", "train", str(corpus.folder), "--steps=2", "--set=batch=2", "--device=cpu", "--out=run")
    arguments = ("lm", "eval", "run", f"--include={tasks}", "--device=cpu", "--limit=2")
    assert "our_choices" in succeed(*arguments, "--tasks=our_choices,our_texts")
    rows = list(read_rows(tmp_path / "run/results.jsonl"))
    assert [(row["task"], row["benchmark"], row["samples"]) for row in rows] == [
        ("lm-eval", "our_choices", 2),
        ("lm-eval", "our_texts", 2),
    ]
    assert {"method", "position", "recipe", "commit"} <= rows[0].keys()
    for wrong, message in ((["--tasks=absent"], "lm-eval has no task absent"), (["--longest=3"], "nothing is cut")):
        monkeypatch.setattr("sys.argv", ["longspan", *arguments, "--tasks=our_choices", *wrong])
        with pytest.raises(SystemExit):
            cli.main()
        assert message in capsys.readouterr().err.replace("\n", " ")
