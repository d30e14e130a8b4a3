"""Every task against a slow checker that reads the tokens with plain Python and works the targets out again."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longspan import tasks
from longspan.tasks.base import BOS, EOS, SEP, Batch, Task
from longspan.tasks.flip_flop import IGNORE, ONE, READ, WRITE, ZERO
from longspan.tasks.local_count import LocalCount
from longspan.tasks.mqmtar import COLON, EMPTY, MQMTAR, QUERY, words
from longspan.tasks.sort import Sort

GENERATIVE = ["copy", "delayed_copy", "flip_flop_dense", "flip_flop_sparse", "mqmtar", "reverse", "sort"]
NAMES = sorted(["2back", "local_count", *GENERATIVE])
Row = tuple[list[int], list[int], list[bool]]
Word = tuple[int, ...]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(batch: Batch) -> Iterable[Row]:
    return zip(*(part.tolist() for part in batch), strict=True)


def split(row: Row) -> tuple[list[int], list[int]]:
    """Source and target of a generative row, after the check that the three tensors tell one story."""
    tokens, targets, mask = row
    whole = [*tokens, EOS]
    sep = whole.index(SEP)
    assert whole[0] == BOS
    assert targets == [0] * sep + whole[sep + 1 :]
    assert mask == [False] * sep + [True] * (len(tokens) - sep)
    source, target = whole[1:sep], whole[sep + 1 : -1]
    assert not {BOS, SEP, EOS} & {*source, *target}
    return source, target


def check_symbols(answer: Callable[[list[int]], list[int]]) -> Callable[[Task, Row, int], None]:
    def check(task: Task, row: Row, length: int) -> None:
        source, target = split(row)
        assert len(source) == length
        assert target == answer(source)

    return check


def check_delayed_copy(task: Task, row: Row, length: int) -> None:
    source, target = split(row)
    assert 1 + len(source) + 1 + len(target) in (length, length - 1)
    assert target == source


def check_two_back(task: Task, row: Row, length: int) -> None:
    tokens, targets, mask = row
    assert len(tokens) == length
    assert all(mask)
    assert tokens[0] == 0
    assert 0 not in tokens[1:]
    for place, target in enumerate(targets):
        assert target == (tokens[place - 2] if place >= 2 else 0)


def blocks(tokens: list[int]) -> list[tuple[int, int]]:
    """(symbol, repeats) of every run of equal tokens."""
    found: list[tuple[int, int]] = []
    for token in tokens:
        if found and found[-1][0] == token:
            found[-1] = (token, found[-1][1] + 1)
        else:
            found.append((token, 1))
    return found


def check_local_count(task: Task, row: Row, length: int) -> None:
    assert isinstance(task, LocalCount)
    (begin, *tokens), (uncounted, *targets), mask = row
    assert begin == task.num_symbols
    assert uncounted == 0
    assert mask == [False, *[True] * length]
    assert len(tokens) == length
    assert max(tokens) < task.num_symbols
    runs = blocks(tokens)
    assert targets == [place for _, repeats in runs for place in range(repeats)]
    assert all(task.min_repeats <= repeats <= task.max_repeats for _, repeats in runs[:-1])
    assert runs[-1][1] <= task.max_repeats


def check_flip_flop(task: Task, row: Row, length: int) -> None:
    source, target = split(row)
    assert len(source) == (length if length % 2 else length - 1)
    *instructions, read = source
    assert read == READ
    assert instructions[0] == WRITE
    stored = -1
    for what, bit in zip(instructions[::2], instructions[1::2], strict=True):
        assert what in (WRITE, IGNORE)
        assert bit in (ZERO, ONE)
        if what == WRITE:
            stored = bit
    assert target == [stored]


def units(source: list[int]) -> list[tuple[int, Word, Word]]:
    """(start, key, value) of every unit."""
    found: list[tuple[int, Word, Word]] = []
    place = 0
    while place < len(source):
        if source[place] == EMPTY:
            place += 1
            continue
        key_1, key_2, colon, value_1, value_2, empty = source[place : place + 6]
        assert (colon, empty) == (COLON, EMPTY)
        found.append((place, (key_1, key_2), (value_1, value_2)))
        place += 6
    return found


@functools.cache
def vocabularies(task: MQMTAR) -> list[set[Word]]:
    halves = words(task.num_words, task.alphabet, task.seed, torch.device("cpu"))
    return [{tuple(word[:2]) for word in half.tolist()} for half in halves]


def check_mqmtar(task: Task, row: Row, length: int) -> None:
    assert isinstance(task, MQMTAR)
    source, target = split(row)
    asked = source[length:]
    assert len(asked) == len(target) == 3 * task.num_queries
    key_words, value_words = vocabularies(task)
    found = units(source[:length])
    assert len(found) == 4 * length // 30
    for _, key, value in found:
        assert key in key_words
        assert value in value_words
    count = Counter(key for _, key, _ in found)
    if len(found) <= task.num_words:
        assert set(count.values()) == {1}
    lookup = {key: value for _, key, value in found}
    for place in range(0, len(asked), 3):
        assert asked[place] == target[place] == QUERY
        key = (asked[place + 1], asked[place + 2])
        assert count[key] == 1, "a query with more than one answer"
        assert lookup[key] == (target[place + 1], target[place + 2])


CHECKERS = {
    "2back": check_two_back,
    "copy": check_symbols(list),
    "delayed_copy": check_delayed_copy,
    "flip_flop_dense": check_flip_flop,
    "flip_flop_sparse": check_flip_flop,
    "local_count": check_local_count,
    "mqmtar": check_mqmtar,
    "reverse": check_symbols(lambda source: source[::-1]),
    "sort": check_symbols(sorted),
}


def check(task: Task, batch: Batch, size: int, length: int) -> None:
    assert [tuple(part.shape) for part in batch] == 3 * [(size, task.time(length))]
    assert [part.dtype for part in batch] == [torch.int64, torch.int64, torch.bool]
    for part in batch[:2]:
        assert set(part.unique().tolist()) <= set(range(task.vocabulary))
    for row in rows(batch):
        CHECKERS[task.name](task, row, length)


@pytest.mark.parametrize(("length", "size"), [(0, 100), *((n, 400) for n in (32, 33, 47, 64)), (200, 60), (3001, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_targets_follow_from_the_tokens(name: str, length: int, size: int) -> None:
    task = tasks.get_task(name)
    length = length or task.shortest
    check(task, task.sample(size, length, generator=generator(length)), size, length)


SMALL: list[tuple[str, dict[str, Any]]] = [
    ("copy", {"num_symbols": 2}),
    ("2back", {"num_symbols": 3}),
    ("local_count", {"num_symbols": 2, "min_repeats": 1, "max_repeats": 3}),
    ("local_count", {"num_symbols": 3, "min_repeats": 4, "max_repeats": 4}),
    ("flip_flop_sparse", {"write_probability": 0.0}),
    ("flip_flop_dense", {"write_probability": 1.0}),
    ("mqmtar", {"alphabet": 4, "num_words": 16, "num_queries": 2, "seed": 5}),
    ("sort", {"few": 0.5}),
    ("sort", {"few": 1.0, "num_symbols": 2}),
]


@pytest.mark.parametrize(("name", "fields"), SMALL)
@pytest.mark.parametrize("length", [64, 101])
def test_other_parameters_hold_too(name: str, fields: dict[str, Any], length: int) -> None:
    task = tasks.get_task(name, **fields)
    check(task, task.sample(100, length, generator=generator(1)), 100, length)


@pytest.mark.parametrize("length", [120, 135, 300, 1000])
def test_keys_that_are_asked_stay_single_when_words_run_out(length: int) -> None:
    """16 words: 16 pairs at length 120 are all different, from 135 on keys repeat."""
    task = MQMTAR(alphabet=8, num_words=16)
    batch = task.sample(200, length, generator=generator(length))
    check(task, batch, 200, length)
    keys = [[key for _, key, _ in units(tokens[1 : length + 1])] for tokens, _, _ in rows(batch)]
    assert any(len(set(row)) < len(row) for row in keys) == (length > 120)


def test_mqmtar_at_the_full_vocabulary() -> None:
    for length in (65_536, 80_000):
        check(MQMTAR(), MQMTAR().sample(1, length), 1, length)


def assert_uniform(counts: Counter[Any], kinds: int) -> None:
    """Chi-squared within five standard deviations of its mean."""
    total = sum(counts.values())
    assert len(counts) == kinds
    chi_squared = sum((count - total / kinds) ** 2 for count in counts.values()) * kinds / total
    assert abs(chi_squared - (kinds - 1)) < 5 * math.sqrt(2 * (kinds - 1)) + 5


@pytest.mark.parametrize("name", ["copy", "reverse", "sort", "delayed_copy", "2back"])
def test_symbols_are_uniform(name: str) -> None:
    batch = tasks.get_task(name).sample(400, 64, generator=generator(0))
    sources = (split(row)[0] if name in GENERATIVE else row[0][1:] for row in rows(batch))
    assert_uniform(Counter(token for source in sources for token in source), 32 if name in GENERATIVE else 15)


def test_sort_of_few_symbols() -> None:
    """Every number of kinds as often as any other, and every symbol too; without `few` the stream is what it was."""
    sources = Sort(num_symbols=4, few=1.0).source(8000, 400, generator(0), "cpu") - 3
    present = torch.nn.functional.one_hot(sources, 4).amax(1)
    assert_uniform(Counter(present.sum(1).tolist()), 4)
    assert_uniform(Counter(present.mul(torch.arange(4)).sum(1)[present.sum(1) == 1].tolist()), 4)
    half = Sort(few=0.5).source(8000, 400, generator(0), "cpu")
    kinds = torch.nn.functional.one_hot(half - 3, 32).amax(1).sum(1)
    assert 0.46 < (kinds < 31).float().mean() < 0.5  # of the others nearly all have 31 or 32
    plain = Sort().sample(3, 20, generator=generator(0))
    assert torch.equal(plain.tokens[:, 1:21], torch.randint(3, 35, (3, 20), generator=generator(0)))
    with pytest.raises(ValueError, match="between 0 and 1"):
        Sort(few=1.5)


def test_local_count_blocks_are_uniform() -> None:
    batch = LocalCount().sample(10, 20_000, generator=generator(0))
    runs = [blocks(tokens[1:]) for tokens, _, _ in rows(batch)]
    # The last blocks before the end are short more often than not: a long one would have crossed it.
    assert_uniform(Counter(repeats for run in runs for _, repeats in run[:-10]), 47)
    steps = Counter((b - a) % 16 for run in runs for (a, _), (b, _) in itertools.pairwise(run))
    assert_uniform(steps, 15)
    short = LocalCount().sample(2000, 1, generator=generator(0))
    assert_uniform(Counter(short.tokens[:, 1].tolist()), 16)


@pytest.mark.parametrize(("name", "probability"), [("flip_flop_sparse", 0.1), ("flip_flop_dense", 0.8)])
def test_flip_flop_writes_as_often_as_it_says(name: str, probability: float) -> None:
    task = tasks.get_task(name)
    batch = task.sample(2000, 101, generator=generator(0))
    later = batch.tokens[:, 3:101:2]
    writes = (later == WRITE).double().mean().item()
    assert abs(writes - probability) < 5 * math.sqrt(probability * (1 - probability) / later.numel())
    assert_uniform(Counter(batch.tokens[:, 2:101:2].flatten().tolist()), 2)
    assert_uniform(Counter(batch.tokens[:, -1].tolist()), 2)


def test_mqmtar_spreads_units_words_and_queries_evenly() -> None:
    task = MQMTAR(alphabet=4, num_words=16, num_queries=2)
    samples = [split(row) for row in rows(task.sample(6000, 15, generator=generator(0)))]
    found = [units(source[:15]) for source, _ in samples]
    # Two units and three free places: any two of five.
    assert_uniform(Counter(tuple(start for start, _, _ in pairs) for pairs in found), 10)
    assert_uniform(Counter(tuple(key for _, key, _ in pairs) for pairs in found), 16 * 15)
    assert_uniform(Counter(tuple(value for _, _, value in pairs) for pairs in found), 16 * 16)
    asked: Counter[tuple[int, ...]] = Counter()
    for (source, _), pairs in zip(samples, found, strict=True):
        keys = [key for _, key, _ in pairs]
        asked[tuple(keys.index((source[place], source[place + 1])) for place in (16, 19))] += 1
    assert_uniform(asked, 4)


def test_mqmtar_fills_four_fifths() -> None:
    task = MQMTAR()
    assert [task.num_pairs(length) for length in (32, 64, 65_536)] == [4, 8, 8738]
    assert all(task.num_pairs(length) == 4 * length // 30 for length in range(1, 100_000))
    assert MQMTAR(density=1.0).num_pairs(600) == 100
    assert MQMTAR(density=0.7).num_pairs(180) == 21  # 0.7 * 180 is a hair less than 126


@pytest.mark.parametrize("density", [0.1, 0.3, 0.6, 0.7, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("num_queries", [1, 3, 4, 7])
def test_mqmtar_knows_its_shortest_length(density: float, num_queries: int) -> None:
    task = MQMTAR(density=density, num_queries=num_queries)
    assert task.num_pairs(task.shortest) == num_queries
    assert task.num_pairs(task.shortest - 1) < num_queries
    task.check_length(task.shortest)


def test_mqmtar_words_are_fixed() -> None:
    """Checkpoints know these words: a change here breaks every trained model."""
    vocabulary = words(10_000, 256, 0, torch.device("cpu"))
    for half, mark in zip(vocabulary, (COLON, EMPTY), strict=True):
        assert half.shape == (10_000, 3)
        assert len({tuple(word) for word in half.tolist()}) == 10_000
        assert set(half[:, 2].tolist()) == {mark}
        assert_uniform(Counter(half[:, :2].flatten().tolist()), 256)
    assert vocabulary.keys[:2, :2].tolist() == [[196, 115], [84, 199]]
    assert vocabulary.values[:2, :2].tolist() == [[45, 178], [26, 128]]
    assert not torch.equal(vocabulary.keys, words(10_000, 256, 1, torch.device("cpu")).keys)


@pytest.mark.parametrize("name", NAMES)
def test_samples_come_from_the_generator(name: str) -> None:
    task = tasks.get_task(name)
    first, again, other = (task.sample(4, 64, generator=generator(seed)) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.tokens, other.tokens)
    source = generator(3)
    state = torch.get_rng_state()
    assert torch.equal(first.tokens, task.sample(4, 64, generator=source).tokens)
    assert not torch.equal(first.tokens, task.sample(4, 64, generator=source).tokens)
    assert torch.equal(state, torch.get_rng_state())


class NoWaiting(TorchDispatchMode):
    """Raises on what reads a value or a shape back from the device, counts the operations that launch something."""

    FORBIDDEN = ("item", "_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "unique_dim")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, f"{func} waits for the device"
        if name in ("index", "index_put_"):
            assert all(index is None or index.dtype == torch.int64 for index in args[1]), "boolean index"
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "length"), [*((name, 64) for name in NAMES), ("mqmtar", 80_000)])
def test_sampling_is_a_few_operations_that_never_wait(name: str, length: int) -> None:
    task = tasks.get_task(name)
    source = generator(0)
    task.sample(1, length, generator=source)
    with NoWaiting() as mode:
        task.sample(2, length, generator=source)
    assert mode.count <= (30 if length > 75_000 else 24 if name == "mqmtar" else 18)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_follow_from_the_length_alone(name: str) -> None:
    """On the meta device there are no values at all, so nothing can depend on them."""
    batch = tasks.get_task(name).sample(8, 262_144, device="meta")
    assert {part.shape for part in batch} == {(8, tasks.get_task(name).time(262_144))}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_a_cuda_graph_holds_the_sampling(name: str) -> None:
    task = tasks.get_task(name)
    source = torch.Generator("cuda").manual_seed(0)
    task.sample(16, 64, generator=source, device="cuda")
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(source)
    with torch.cuda.graph(graph):
        batch = task.sample(16, 64, generator=source, device="cuda")
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn.append(Batch(*(part.cpu() for part in batch)))
        check(task, drawn[-1], 16, 64)
    assert not torch.equal(drawn[0].tokens, drawn[1].tokens)


IMPOSSIBLE: list[tuple[str, dict[str, Any], int, str]] = [
    ("copy", {}, 0, "copy: length 0 is too short, the shortest is 1"),
    ("copy", {"num_symbols": 1}, 32, "copy needs at least two symbols"),
    ("delayed_copy", {}, 3, "the shortest is 4"),
    ("2back", {}, 2, "the shortest is 3"),
    ("2back", {"num_symbols": 2}, 32, "at least two more"),
    ("local_count", {"num_symbols": 1}, 32, "two symbols for neighbours to differ"),
    ("local_count", {"min_repeats": 5, "max_repeats": 4}, 32, "min_repeats 5 and max_repeats 4"),
    ("local_count", {"min_repeats": 0}, 32, "min_repeats 0"),
    ("flip_flop_sparse", {}, 2, "the shortest is 3"),
    ("flip_flop_dense", {"write_probability": 1.5}, 32, r"flip_flop_dense: write_probability is in \[0, 1\], got 1.5"),
    ("mqmtar", {}, 29, "length 29 holds 3 pairs at density 0.8, fewer than the 4 queries; the shortest is 30"),
    ("mqmtar", {}, -9, "length -9 holds 0 pairs"),
    ("mqmtar", {"num_queries": 9}, 64, "length 64 holds 8 pairs .* fewer than the 9 queries"),
    ("mqmtar", {"alphabet": 10}, 64, "an alphabet of 10 has 100 words of two tokens, fewer than num_words 10000"),
    ("mqmtar", {"num_queries": 0}, 64, "num_queries 0"),
    ("mqmtar", {"num_words": 4}, 64, "num_queries 4 and num_words 4"),
    ("mqmtar", {"density": 1.1}, 64, "density is in"),
    ("mqmtar", {"pairs": 3}, 64, "mqmtar has no field pairs; there are alphabet, num_words, num_queries"),
    ("mqmtra", {}, 64, "unknown task 'mqmtra'; there are 2back, copy,"),
    ("max_retrieval", {}, 64, "unknown task"),
]


@pytest.mark.parametrize(("name", "fields", "length", "message"), IMPOSSIBLE)
def test_what_cannot_be_says_why(name: str, fields: dict[str, Any], length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tasks.get_task(name, **fields).sample(2, length)
