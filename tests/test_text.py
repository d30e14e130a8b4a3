"""From files to a corpus: what is kept, where it goes, and what is said when something is wrong."""

import errno
import functools
import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tiny_text import tiny_corpus, write_texts

from longspan.text import corpora
from longspan.text.corpora import Corpus, build_corpus, open_corpus, split_texts
from longspan.text.documents import CorpusError, clean, from_dataset, from_folder, from_installed
from longspan.text.shards import ShardWriter, TokenStream
from longspan.text.tokenizer import in_pieces, load_tokenizer, train_tokenizer

TEXTS = ["The river sings slowly. " * 20, "Zahlen: 1234567 und 42; naïve café ☕\n\n\ttabbed\n" * 9, "x" * 500]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return tiny_corpus(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("raw", "cleaned"),
    [
        ("a\r\nb\rc", "a\nb\nc"),
        ("  a  \nb\t\n", "a\nb"),
        ("a\n\n\n\n\n\nb", "a\n\n\nb"),
        ("\ufeffa\x00\x1b[1mb\x0c", "a[1mb"),
        ("a\ud83db", "ab"),  # half of a pair, which no tokenizer takes
        ("a" + " " * 1_000_000 + "b", "a" + " " * 1_000_000 + "b"),  # in a moment, not in the square of it
    ],
    ids=["newlines", "blanks", "empty-lines", "control", "surrogate", "a-long-gap"],
)
def test_cleaning(raw: str, cleaned: str) -> None:
    assert clean(raw) == cleaned
    assert clean(cleaned) == cleaned


def test_a_folder_gives_its_text_files_by_path_and_counts_the_others(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.rst.gz").write_bytes(gzip.compress(b"three"))
    (tmp_path / "d.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "e.txt.gz").write_bytes(b"not gzip")
    (tmp_path / "e2.txt.gz").write_bytes(gzip.compress(b"three")[:10] + b"\xff" * 100)  # damaged behind its header
    (tmp_path / "f.png").write_bytes(b"no text")
    (tmp_path / "g.txt").symlink_to(tmp_path / "a.txt")
    counts: Counter[str] = Counter()
    assert list(from_folder(tmp_path)(counts)) == ["one", "two", "three"]
    assert counts == {"not text": 3}
    with pytest.raises(CorpusError, match="there is no folder"):
        from_folder(tmp_path / "absent")


def test_what_is_installed_is_prose_and_docstrings(tmp_path: Path) -> None:
    doc, library = tmp_path / "doc", tmp_path / "lib"
    (library / "site-packages").mkdir(parents=True)
    doc.mkdir()
    (doc / "README").write_text("read me")
    (doc / "changelog.txt").write_text("changes")
    (doc / "copyright").write_text("licence")
    (library / "a.py").write_text(
        '"""About a."""\nclass A:\n    """An A."""\n    def f(self):\n        """Does f."""\n'
    )
    (library / "b.py").write_text("def broken(:\n")
    (library / "site-packages" / "c.py").write_text('"""Somebody else\'s."""')
    counts: Counter[str] = Counter()
    texts = list(from_installed(doc, library, topics=False)(counts))
    assert texts == ["read me", "About a.\n\nA\n\nAn A.\n\nf\n\nDoes f."]
    assert counts == {"not Python": 1}
    assert len(list(from_installed(doc, library)(counts))) > 50  # Python's language reference


def test_duplicates_and_short_texts_are_left_out_and_the_split_is_the_texts_own(tmp_path: Path) -> None:
    texts = write_texts(tmp_path, [50] * 40)
    (tmp_path / "copy.txt").write_text(texts[3] + "  \r\n")  # equal once cleaned
    (tmp_path / "short.txt").write_text("short")
    counts: Counter[str] = Counter()
    kept = {text: split for split, text in split_texts(from_folder(tmp_path), 0.3, 100, counts)}
    assert counts == {"documents": 40, "duplicates": 1, "too short": 1}
    backwards = {text: split for split, text in split_texts(lambda _: iter(texts[::-2]), 0.3, 100, Counter())}
    assert backwards == {text: kept[text] for text in texts[::-2]}
    assert 4 <= sum(split == "validation" for split in kept.values()) <= 20


@pytest.mark.parametrize("text", TEXTS, ids=["prose", "unicode", "one-word"])
def test_a_trained_tokenizer_gives_back_every_byte(text: str, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS[:1], 300)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    (whole,) = tokenizer.encode_documents([text])
    assert whole == [tokenizer.begin, *tokenizer.encode(text), tokenizer.end]
    assert tokenizer.decode(whole) == text
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path)
    assert (again.encode(text), again.vocabulary) == (tokenizer.encode(text), tokenizer.vocabulary)


def test_a_mark_in_a_text_is_text(tmp_path: Path) -> None:
    train_tokenizer(TEXTS, 300).save(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("a <|end|> of <|begin|>")
    assert not {tokenizer.begin, tokenizer.end} & set(ids)
    assert tokenizer.decode(ids) == "a <|end|> of <|begin|>"


def test_without_the_package_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(CorpusError, match=r"pip install 'longspan\[lm\]'"):
        train_tokenizer(TEXTS, 300)


@pytest.mark.parametrize("text", ["abcdefgh" * 100_000, " " * 500_000 + "a"], ids=["one-word", "blanks"])
def test_a_text_without_a_break_trains_a_tokenizer_in_a_moment(text: str) -> None:
    """The trainer takes the square of the longest word."""
    tokenizer = train_tokenizer([text, *TEXTS], 300)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_only_what_is_too_long_is_cut_for_the_trainer() -> None:
    texts = [*TEXTS, "x" * 25_000 + "  river " + "y" * 10_000, ""]
    assert "".join(in_pieces(texts)) == "".join(texts)
    assert [len(piece) for piece in in_pieces(texts)] == [*map(len, TEXTS), 10_000, 10_000, 15_008]


def test_every_digit_is_a_token() -> None:
    tokenizer = train_tokenizer(["1234567 1234567 1234567 1234567"] * 50, 300)
    assert len(tokenizer.encode("1234567")) == 7


def test_a_tokenizer_needs_room_marks_and_a_file(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="at least 258"):
        train_tokenizer(TEXTS, 200)
    with pytest.raises(CorpusError, match="there is no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorpusError, match="not a file of the tokenizers package"):
        load_tokenizer(tmp_path)
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    renamed = (tmp_path / "tokenizer.json").read_text().replace("<|begin|>", "<|other|>")
    (tmp_path / "tokenizer.json").write_text(renamed)
    with pytest.raises(CorpusError, match="begin and end a document"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_reaches_to_the_last_id_over_gaps(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel

    ids = {"river": 0, "<s>": 7, "</s>": 8, "sea": 70_000}
    Backend(WordLevel(ids, unk_token="sea")).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).vocabulary == 70_001


def test_a_corpus_holds_every_document_whole_once(corpus: Corpus) -> None:
    texts = {path.read_text() for path in (corpus.folder.parent / "texts").iterdir()}
    found = []
    for split in corpora.SPLITS:
        stream = corpus.split(split)
        assert corpus.facts[split] == {"documents": stream.documents, "tokens": len(stream)}
        for number in range(stream.documents):
            ids = stream.document(number)
            assert (int(ids[0]), int(ids[-1])) == (corpus.tokenizer.begin, corpus.tokenizer.end)
            found.append(corpus.tokenizer.decode(ids.tolist()))
    assert len(found) == len(texts)
    assert set(found) == texts


def test_a_corpus_is_built_once_and_only_finished_ones_open(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="holds a corpus already"):
        build_corpus(corpus.folder, lambda counts: iter(TEXTS), tokenizer=300)
    with pytest.raises(CorpusError, match="never finished"):
        open_corpus(tmp_path)
    with pytest.raises(CorpusError, match=r"train split is empty.*3 too short"):
        build_corpus(tmp_path, lambda counts: iter(TEXTS), tokenizer=300, shortest=1000, validation=0.5)
    assert not (tmp_path / "corpus.json").exists()
    for damaged in ('{"train": ', "{}", "[]", '{"train": 3}', '{"train": {"tokens": 3}}'):
        (tmp_path / "corpus.json").write_text(damaged)
        with pytest.raises(CorpusError, match=r"corpus.json is damaged: .* Build the corpus again"):
            open_corpus(tmp_path)


@pytest.mark.parametrize(("vocabulary", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_shards_give_back_what_was_written_across_their_borders(tmp_path: Path, vocabulary: int, dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in (5, 1, 30, 2, 7, 12)]
    documents[0][0] = vocabulary - 1
    writer = ShardWriter(tmp_path, vocabulary, shard_tokens=10)
    for document in documents:
        writer.add(document)
    writer.close()
    stream = TokenStream(tmp_path)
    assert json.loads((tmp_path / "shard-0000.json").read_text())["dtype"] == dtype
    assert (len(stream.shards), len(stream), stream.documents) == (4, 57, 6)
    flat = [token for document in documents for token in document]
    assert stream.read(0, 57).tolist() == flat
    assert stream.read(4, 40).tolist() == flat[4:40]
    assert stream.read(8, 8).tolist() == []
    assert [stream.document(number).tolist() for number in range(6)] == documents
    assert stream.document_lengths().tolist() == [5, 1, 30, 2, 7, 12]
    assert stream.document_numbers(3, 8).tolist() == [0, 0, 1, 2, 2]
    with pytest.raises(IndexError, match="not within the 57 tokens"):
        stream.read(50, 58)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("shard-0000.bin", _cut, "instead of .* it was cut"),
        ("shard-0000.bin", _flip, "damaged: its checksum"),
        ("shard-0000.bin", Path.unlink, "is missing"),
        ("shard-0000.json", _cut, "not the index of a shard"),
        ("shard-0000.json", lambda path: path.write_text('{"format": "other"}'), "format is 'other'"),
        ("shard-0000.json", lambda path: path.write_text(path.read_text().replace("[3,", "[7,")), "not in order"),
        (
            "shard-0000.json",
            lambda path: path.write_text(path.read_text().replace("[3,", "[2,")),
            "ends does not match",
        ),
        ("shard-0000.json", lambda path: path.write_text(path.read_text().replace("[3,", "[3.5,")), "whole numbers"),
        ("shard-0000.json", Path.unlink, "has no shards"),
    ],
    ids=[
        "cut",
        "flipped",
        "missing",
        "cut-index",
        "other-format",
        "flipped-index",
        "moved-end",
        "half-end",
        "no-index",
    ],
)
def test_a_damaged_shard_is_told(tmp_path: Path, name: str, damage: "object", message: str) -> None:
    writer = ShardWriter(tmp_path, 100)
    writer.add([1, 2, 3])
    writer.add([4, 5])
    writer.close()
    assert len(TokenStream(tmp_path)) == 5
    damage(tmp_path / name)  # type: ignore[operator]
    with pytest.raises(CorpusError, match=message):
        TokenStream(tmp_path)


def test_an_index_from_before_the_ends_had_a_checksum_opens(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, 100)
    writer.add([1, 2, 3])
    writer.close()
    index = json.loads((tmp_path / "shard-0000.json").read_text())
    del index["ends_checksum"]
    (tmp_path / "shard-0000.json").write_text(json.dumps(index))
    assert len(TokenStream(tmp_path)) == 3


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is asked for before the file is mapped: writing through a map that finds none ends the process."""

    def full(file: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, f"no space for {size} bytes")

    monkeypatch.setattr("os.posix_fallocate", full)
    writer = ShardWriter(tmp_path, 100)
    writer.add([1, 2, 3])
    with pytest.raises(OSError, match="no space for 6 bytes"):
        writer.close()


def test_a_shard_that_is_missing_with_its_index_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "ShardWriter", functools.partial(ShardWriter, shard_tokens=2000))
    corpus = tiny_corpus(tmp_path)
    last = sorted((corpus.folder / "train").glob("shard-*.json"))[-1]
    last.unlink()
    last.with_suffix(".bin").unlink()
    with pytest.raises(CorpusError, match=r"train has \d+ documents .* instead of \d+"):
        corpus.split("train")


def test_a_dataset_is_streamed_or_the_reason_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CorpusError, match="pip install datasets"):
        from_dataset("some/name")
    asked = []

    def load_dataset(*args: object, **options: object) -> list[dict[str, str | None]]:
        asked.append((args, options))
        if args[0] == "no/network":
            raise ConnectionError("no route")
        return [{"text": text} for text in (*TEXTS, None)]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert list(from_dataset("some/name:small", most=2)(Counter())) == TEXTS[:2]
    assert asked == [(("some/name", "small"), {"split": "train", "streaming": True})]
    counts: Counter[str] = Counter()
    assert list(from_dataset("some/name")(counts)) == TEXTS
    assert counts == {"not text": 1}
    with pytest.raises(CorpusError, match="cannot be read: no route"):
        list(from_dataset("no/network")(Counter()))
    with pytest.raises(CorpusError, match="no field 'body'; it has text"):
        list(from_dataset("some/name", field="body")(Counter()))


def test_at_most_two_empty_lines_in_a_row_are_left() -> None:
    assert [clean("a" + "\n" * breaks + "b").count("\n") for breaks in (1, 2, 3, 4, 5, 6)] == [1, 2, 3, 3, 3, 3]


def test_a_librarys_own_tests_are_left_out(tmp_path: Path) -> None:
    library = tmp_path / "tests"  # wherever it is itself
    for folder in ("a", "test", "tests", "idle_test", "dist-packages"):
        (library / folder).mkdir(parents=True)
        (library / folder / "module.py").write_text(f'"""About {folder}."""')
    assert list(from_installed(tmp_path / "no doc", library, topics=False)(Counter())) == ["About a."]


def test_a_shard_that_is_too_long_is_told(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, 100)
    writer.add([1, 2, 3])
    writer.close()
    with (tmp_path / "shard-0000.bin").open("ab") as file:
        file.write(b"\0\0")
    with pytest.raises(CorpusError, match="has 8 bytes instead of 6"):
        TokenStream(tmp_path, verify=False)


def test_shards_of_a_corpus_that_was_never_finished_are_no_part_of_the_next(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "corpus" / "train", 300, shard_tokens=1)
    for _ in range(5):
        writer.add([1, 2])
    writer.close()
    stream = tiny_corpus(tmp_path).split("train")
    assert len(stream.shards) == 1
