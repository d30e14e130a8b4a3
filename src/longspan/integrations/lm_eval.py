"""Our language models in lm-eval's harness: every request is read whole, and one that cannot be is an error.

A text begins with the begin mark, as a training document does. Without a limit there is nothing to cut: our models read
any length. With one, a request beyond it raises `TooLong`; only rolling perplexity, which lm-eval defines by windows,
goes on in windows of that many tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor, nn

from longspan.evaluate.continuation import batches_by_length, continuations
from longspan.nn.llama import Llama
from longspan.text.tokenizer import Tokenizer
from longspan.train.config import Precision

_TOKENS = {"cpu": 1 << 13, "cuda": 1 << 17}  # read at once, padding included


class TooLong(ValueError):
    """A request with more tokens than the limit; nothing is cut to make it fit."""


class LongspanLM(TemplateLM):
    """A trained model for `lm_eval.simple_evaluate(model=...)`.

    Args:
        longest: tokens that a request may have, what is to be generated included; None for any number.
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        *,
        longest: int | None = None,
        precision: Precision = "float32",
    ):
        super().__init__()
        if longest is not None and longest < 2:
            raise ValueError(f"longest must be at least 2, got {longest}")
        self.model, self.text, self.longest = model, tokenizer, longest
        self.place = next(model.parameters()).device
        self.half = precision == "bfloat16" and self.place.type == "cuda"

    @property
    def eot_token_id(self) -> int:
        return self.text.end

    @property
    def prefix_token_id(self) -> int:
        return self.text.begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text, after the begin mark unless that is refused."""
        ids = self.text.encode(string)
        return ids if add_special_tokens is False else [self.text.begin, *ids]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood, whether it is the greedy one) of continuations; an empty one is told before any is read."""
        for context, continuation in (request.args for request in requests):
            if not self.text.encode(continuation):
                raise ValueError(f"there is nothing to score: {continuation!r} after {context[-80:]!r} has no token")
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As lm-eval does it: the whole is encoded and cut where the context alone ends.

        Where a token reaches over that place there may be nothing behind it; then each part is encoded alone.
        """
        before, after = super()._encode_pair(context, continuation)
        return before, after or self.tok_encode(continuation, add_special_tokens=False)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts."""
        pairs: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = self.text.encode(request.args[0])
            window = self.longest or max(len(ids), 1)
            windows = get_rolling_token_windows(ids, self.text.begin, max_seq_len=window, context_len=1)
            for pair in map(make_disjoint_window, windows):
                pairs.append(pair)
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (likelihood, _) in zip(owners, self._scored(pairs), strict=True):
            totals[owner] += likelihood
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return self._scored([(context, continuation) for _, context, continuation in requests])

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations up to the first stop string."""
        asked = [normalize_gen_kwargs(request.args[1]) for request in requests]
        if any(options["do_sample"] for options in asked):
            raise ValueError("generation is greedy: set do_sample to false and temperature to 0")
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        for prompt, options in zip(prompts, asked, strict=True):
            self._check(len(prompt) + options["max_gen_toks"])
        said = [""] * len(requests)
        for numbers in self._batches([len(prompt) for prompt in prompts]):
            most = max(asked[number]["max_gen_toks"] for number in numbers)
            with self._running():
                rows = continuations(
                    self.model, [prompts[i] for i in numbers], most, stop=self.text.end, device=self.place
                )
            for number, row in zip(numbers, rows, strict=True):
                text = self.text.decode(row[: asked[number]["max_gen_toks"]])
                said[number] = _before(text, asked[number]["until"])
        return said

    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation, whether it is the greedy one) of every (context, continuation)."""
        for context, continuation in pairs:
            self._check(len(context) + len(continuation) - 1)
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        for numbers in self._batches([len(context) + len(continuation) for context, continuation in pairs]):
            for number, answer in zip(numbers, self._batch([pairs[i] for i in numbers]), strict=True):
                found[number] = answer
        return found

    @torch.no_grad()
    def _batch(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[float, bool]]:
        lengths = [len(context) + len(continuation) - 1 for context, continuation in pairs]  # read; the last is not
        tokens = torch.zeros(len(pairs), max(lengths), dtype=torch.int64)
        for row, (context, continuation) in enumerate(pairs):
            tokens[row, : lengths[row]] = torch.tensor([*context, *continuation][:-1])
        with self._running():
            features = self.model.features(
                tokens.to(self.place), lengths=torch.tensor(lengths, device=self.place)
            )  # (B, T, D)
            for row, (_, continuation) in enumerate(pairs):
                ends = lengths[row]
                yield _answer(self.model.output(features[row, ends - len(continuation) : ends]), continuation)

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        return batches_by_length(lengths, _TOKENS.get(self.place.type, 1 << 13))

    def _running(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.place.type, torch.bfloat16, enabled=self.half)

    def _check(self, tokens: int) -> None:
        if self.longest is not None and tokens > self.longest:
            raise TooLong(f"a request has {tokens} tokens, the limit is {self.longest}: raise it, nothing is cut")


def _answer(logits: Tensor, continuation: Sequence[int]) -> tuple[float, bool]:
    targets = torch.tensor(continuation, device=logits.device)
    likelihood = -nn.functional.cross_entropy(logits.float(), targets, reduction="sum")
    return float(likelihood), bool((logits.argmax(-1) == targets).all())


def _before(text: str, stops: Sequence[str]) -> str:
    """What of a text comes before the first of the stop strings."""
    return text[: min((text.find(stop) for stop in stops if stop and stop in text), default=len(text))]
