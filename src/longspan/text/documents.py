"""Where documents come from: a folder, what is installed on the machine, or a Hugging Face dataset.

A source is an iterator of texts in an order that is the same every time. What is not readable text is left out and
counted by the reason why.
"""

import ast
import gzip
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst"})
# Names without a suffix that hold prose in a folder of documentation.
PROSE_NAMES = re.compile(r"(README|NEWS|FAQ|HOWTO|TODO|INSTALL|THANKS|INTRO|GUIDE|MANUAL)", re.IGNORECASE)

# Folders of a standard library that are not the library's own, or only test it.
_FOREIGN = {"site-packages", "dist-packages", "test", "tests", "idle_test"}

# Also halves of surrogate pairs, which are no text: tokenizers refuse them.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff\ud800-\udfff]")
_EMPTY_LINES = re.compile(r"\n{4,}")

Source = Callable[[Counter[str]], Iterator[str]]


class CorpusError(ValueError):
    """A corpus that cannot be built or read, and what to do about it."""


def clean(text: str) -> str:
    """The text with plain newlines, no control characters, no trailing blanks and at most two empty lines in a row."""
    text = _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    # Line by line: a pattern for blanks before a newline takes the square of the longest run of blanks.
    text = "\n".join(line.rstrip(" \t") for line in text.split("\n"))
    return _EMPTY_LINES.sub("\n\n\n", text).strip()


def read_text(path: Path) -> str | None:
    """The text of a file, unpacked if it ends in .gz; None if it is not UTF-8 text."""
    data = path.read_bytes()
    try:
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        return None if b"\0" in data else data.decode()
    except (UnicodeDecodeError, OSError, EOFError, zlib.error):
        return None


def from_files(paths: Iterable[Path], counts: Counter[str]) -> Iterator[str]:
    """The texts of files."""
    for path in paths:
        try:
            text = read_text(path)
        except OSError:
            counts["unreadable"] += 1
            continue
        if text is None:
            counts["not text"] += 1
        else:
            yield text


def from_folder(folder: Path) -> Source:
    """Every text file (.txt, .md, .rst, plain or .gz) under a folder, by path."""
    if not folder.is_dir():
        raise CorpusError(f"there is no folder {folder}")
    return lambda counts: from_files(_files(folder, _is_text), counts)


def from_installed(
    documentation: Path = Path("/usr/share/doc"), library: Path | None = None, topics: bool = True
) -> Source:
    """What a Debian machine with Python has: packages' documentation, Python's language reference and docstrings."""
    library = Path(sysconfig.get_path("stdlib")) if library is None else library

    def read(counts: Counter[str]) -> Iterator[str]:
        if documentation.is_dir():
            yield from from_files(_files(documentation, _is_documentation), counts)
        if topics:
            from pydoc_data.topics import topics as reference

            yield from reference.values()
        for path in _files(library, lambda path: path.suffix == ".py"):
            if not _FOREIGN & set(path.relative_to(library).parts):
                yield from _docstrings(path, counts)

    return read


def from_dataset(name: str, *, field: str = "text", most: int | None = None) -> Source:
    """The first `most` documents of a Hugging Face dataset, streamed; ``name:config`` names a configuration."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise CorpusError(f"streaming the dataset {name} needs datasets: pip install datasets") from error
    repository, _, configuration = name.partition(":")

    def read(counts: Counter[str]) -> Iterator[str]:
        try:
            rows = load_dataset(repository, configuration or None, split="train", streaming=True)
            for number, row in enumerate(rows):
                if number == most:
                    return
                if field not in row:
                    raise CorpusError(f"{name} has no field {field!r}; it has {', '.join(row)}")
                if isinstance(row[field], str):
                    yield row[field]
                else:
                    counts["not text"] += 1
        except (OSError, RuntimeError) as error:  # what the hub's client raises without a network
            raise CorpusError(f"the dataset {name} cannot be read: {error}") from error

    return read


def _files(folder: Path, wanted: Callable[[Path], bool]) -> Iterator[Path]:
    """Files under a folder in the order of their paths, links left out: they would repeat what they point at."""
    return (path for path in sorted(folder.rglob("*")) if wanted(path) and path.is_file() and not path.is_symlink())


def _is_text(path: Path) -> bool:
    name = path.with_suffix("") if path.suffix == ".gz" else path
    return name.suffix.lower() in TEXT_SUFFIXES


def _is_documentation(path: Path) -> bool:
    """Prose by its suffix or its name; a list of changes is none."""
    name = path.stem if path.suffix == ".gz" else path.name
    if "change" in name.lower():
        return False
    return _is_text(path) or ("." not in name and PROSE_NAMES.search(name) is not None)


def _docstrings(path: Path, counts: Counter[str]) -> Iterator[str]:
    """The docstrings of a module, one text, each under the name of what it describes."""
    try:
        module = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        counts["not Python"] += 1
        return
    if text := "\n\n".join(_described(module)):
        yield text


def _described(node: ast.Module | ast.ClassDef) -> Iterator[str]:
    """The docstring of a module or class, then those of what it defines."""
    if text := ast.get_docstring(node):
        yield text
    for inner in node.body:
        if isinstance(inner, ast.ClassDef):
            yield "\n\n".join([inner.name, *_described(inner)])
        elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(inner)):
            yield f"{inner.name}\n\n{text}"
