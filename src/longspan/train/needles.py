"""A short fine-tuning on needles, after which a small model knows what it is asked: the same one for every method.

A base model of 50M parameters has never seen the question of S-NIAH and often does not answer it, whatever its
attention could find. Here it learns the form of the question and the answer, at lengths within its training context;
only the answer counts. What the needles of longer haystacks measure is then how far finding carries, not whether the
question was understood.
"""

import functools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longspan.nn.llama import Llama
from longspan.text.corpora import Corpus, open_corpus
from longspan.text.documents import CorpusError
from longspan.text.needles import HAYSTACKS, Needle, NeedleMaker
from longspan.train import checkpoint as checkpoints
from longspan.train.config import OptimizerConfig, Precision, to_json
from longspan.train.lm import LanguageConfig
from longspan.train.optimizers import Optimizer

_ANSWER_TOKENS = 16  # room for " 1234567." and the end mark, every digit a token
_ESSAYS = 200  # training documents that the haystacks of S-NIAH-2 are cut from
_APART = 10**12  # from the seeds that the needles of an evaluation are drawn with


@dataclass(frozen=True)
class Tuning:
    """How a model is fine-tuned on needles: both tasks in turn, lengths and depths drawn evenly."""

    steps: int = 300
    batch: int = 64
    samples: int = 4096  # different ones, read over and over
    shortest: int = 256  # tokens; the longest have the training context
    learning_rate: float = 3e-4
    warmup: int = 30
    seed: int = 0


class Lesson(NamedTuple):
    """A needle with its answer, as ids; the loss counts from `answer` on."""

    ids: list[int]
    answer: int


def makers_for(corpus: Corpus) -> list[NeedleMaker]:
    """One for each task; essays are training documents, so that an evaluation in validation ones is in new text."""
    stream = corpus.split("train")
    essays = [corpus.tokenizer.decode(stream.document(i).tolist()) for i in range(min(_ESSAYS, stream.documents))]
    return [NeedleMaker(task, corpus.tokenizer, essays=essays, answer_tokens=_ANSWER_TOKENS) for task in HAYSTACKS]


def lesson(makers: Sequence[NeedleMaker], number: int, context: int, tuning: Tuning) -> Lesson:
    """The lesson of a number, a function of the seed and nothing else."""
    if not tuning.shortest <= context:
        raise CorpusError(f"the shortest needles have {tuning.shortest} tokens, more than the context of {context}")
    draw = Random(f"lesson {tuning.seed} {number}")
    maker = makers[number % len(makers)]
    length, depth = draw.randint(tuning.shortest, context), draw.random()
    return _with_answer(maker, maker.make(length, depth, _APART + tuning.seed * 1_000_003 + number))


def lessons(makers: Sequence[NeedleMaker], context: int, tuning: Tuning) -> list[Lesson]:
    """All the lessons of a tuning."""
    with ThreadPoolExecutor() as pool:  # as `NeedleMaker.samples`
        return list(pool.map(lambda number: lesson(makers, number, context, tuning), range(tuning.samples)))


@functools.lru_cache(maxsize=1)
def lessons_of(corpus: Path, context: int, tuning: Tuning) -> list[Lesson]:
    """The lessons that a corpus gives; made once where several models are tuned in turn."""
    return lessons(makers_for(open_corpus(corpus)), context, tuning)


def tune(
    model: Llama,
    given: Sequence[Lesson],
    tuning: Tuning,
    precision: Precision = "float32",
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Fine-tune `model` in place; returns the loss of the last step, nats an answer's token.

    AdamW, a linear warm-up, then linear to zero. `report` gets the step and the loss every tenth step.
    """
    device = next(model.parameters()).device
    config = OptimizerConfig(learning_rate=tuning.learning_rate, betas=(0.9, 0.95), warmup=tuning.warmup)
    optimizer = Optimizer(model, config)
    order = Random(f"order {tuning.seed}").sample(range(len(given)), len(given))
    longest = max(len(one.ids) for one in given)
    model.train()
    value = float("nan")
    for step in range(tuning.steps):
        chosen = [given[order[(step * tuning.batch + row) % len(order)]] for row in range(tuning.batch)]
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            loss = _answer_loss(model, chosen, longest, device)
        loss.backward()
        rising, falling = (step + 1) / max(tuning.warmup, 1), 1 - step / tuning.steps
        optimizer.rate.fill_(min(rising, falling, 1.0))
        optimizer.step({name: parameter.grad for name, parameter in model.named_parameters()})  # type: ignore[misc]
        model.zero_grad(set_to_none=True)
        if step % 10 == 9 or step + 1 == tuning.steps:
            value = float(loss.detach())
            report(step + 1, value)
    model.eval()
    return value


def save_tuned(folder: Path, model: Llama, config: LanguageConfig, step: int) -> None:
    """A run to be measured: the weights alone, under a name that tells what was done to them."""
    told = to_json(replace(config, name=f"{config.name}+needles"))
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    checkpoints.save(folder / "checkpoints", checkpoints.Checkpoint(step, told, tensors))
    (folder / "config.json").write_text(json.dumps(told, indent=2) + "\n")


def _with_answer(maker: NeedleMaker, needle: Needle) -> Lesson:
    prompt = needle.ids.tolist()
    answer = maker.tokenizer.encode(f" {needle.answer}.")
    return Lesson([*prompt, *answer, maker.tokenizer.end], len(prompt))


def _answer_loss(model: Llama, chosen: Sequence[Lesson], longest: int, device: torch.device) -> Tensor:
    """The mean loss of the answers' tokens; rows are padded on the right."""
    tokens = torch.zeros(len(chosen), longest, dtype=torch.int64)
    counts = torch.zeros(len(chosen), longest, dtype=torch.bool)  # positions whose next token is the answer's
    for row, one in enumerate(chosen):
        tokens[row, : len(one.ids)] = torch.tensor(one.ids)
        counts[row, one.answer - 1 : len(one.ids) - 1] = True
    tokens, counts = tokens.to(device), counts.to(device)
    lengths = torch.tensor([len(one.ids) for one in chosen], device=device)
    features = model.features(tokens, lengths=lengths)
    targets = tokens.roll(-1, dims=1)[counts]
    return nn.functional.cross_entropy(model.output(features[counts]).float(), targets)
