"""Shards: token ids on disk, read through a memory map, with the boundaries of the documents beside them.

    FOLDER/shard-0000.bin     the ids, one after another, little-endian uint16 or uint32
           shard-0000.json    {"format": "longspan tokens", "dtype": "uint16", "tokens": 1234,
                               "ends": [310, 1234], "checksum": "...", "ends_checksum": "..."}

`ends` are where the documents end, so document i is ``[ends[i - 1], ends[i])``; a document is never cut in two. The
checksums are BLAKE2b of 16 bytes, over the .bin file and over the ends as JSON writes them; an older index has none of
the ends. The index is written last and by renaming, so a shard that has an index is complete.
"""

import hashlib
import json
import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from longspan.text.documents import CorpusError

FORMAT = "longspan tokens"
SHARD_TOKENS = 1 << 26
_DTYPES = {"uint16": torch.uint16, "uint32": torch.uint32}


class ShardWriter:
    """Writes documents into shards of about `shard_tokens` tokens."""

    def __init__(self, folder: Path, vocabulary: int, shard_tokens: int = SHARD_TOKENS):
        self.folder, self.shard_tokens = folder, shard_tokens
        self.dtype = "uint16" if vocabulary <= 1 << 16 else "uint32"
        self.tokens = self.documents = self._written = 0
        self._pending: list[Tensor] = []
        self._pending_tokens = 0
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, document: Sequence[int]) -> None:
        if self._pending and self._pending_tokens + len(document) > self.shard_tokens:
            self._flush()
        self._pending.append(torch.tensor(document, dtype=_DTYPES[self.dtype]))
        self._pending_tokens += len(document)
        self.documents += 1
        self.tokens += len(document)

    def close(self) -> None:
        """Write what is still pending."""
        if self._pending:
            self._flush()

    def _flush(self) -> None:
        if sys.byteorder != "little":
            raise CorpusError("shards are little-endian, this machine is not")
        path = self.folder / f"shard-{self._written:04d}.bin"
        tokens = self._pending_tokens
        _make_file(path, tokens * _DTYPES[self.dtype].itemsize)
        mapped = torch.from_file(str(path), shared=True, size=tokens, dtype=_DTYPES[self.dtype])
        torch.cat(self._pending, out=mapped)
        del mapped  # unmapped, the file holds what was written
        ends = list(accumulate(map(len, self._pending)))
        index = {
            "format": FORMAT,
            "dtype": self.dtype,
            "tokens": tokens,
            "ends": ends,
            "checksum": _file_checksum(path),
            "ends_checksum": _checksum_of_ends(ends),
        }
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(index))
        draft.rename(path.with_suffix(".json"))
        self._written += 1
        self._pending, self._pending_tokens = [], 0


class Shard:
    """One shard, opened: `ids` is mapped, not read."""

    def __init__(self, index_path: Path):
        self.path = index_path.with_suffix(".bin")
        try:
            index = json.loads(index_path.read_text())
            if index["format"] != FORMAT:
                raise ValueError(f"its format is {index['format']!r}, not {FORMAT!r}")
            dtype, self.ends, self.checksum = _DTYPES[index["dtype"]], index["ends"], index["checksum"]
            tokens = index["tokens"]
            if not self.ends or self.ends[-1] != tokens:
                raise ValueError(f"its documents end at {self.ends[-1:]}, its tokens at {tokens}")
            if not all(type(end) is int for end in self.ends):
                raise ValueError("its documents do not end at whole numbers")
            if any(end <= before for before, end in pairwise([0, *self.ends])):
                raise ValueError("its documents are not in order")
            if "ends_checksum" in index and index["ends_checksum"] != _checksum_of_ends(self.ends):
                raise ValueError("the checksum of its documents' ends does not match")
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CorpusError(
                f"{index_path} is not the index of a shard: {error!r}. Build the corpus again."
            ) from error
        if not self.path.is_file():
            raise CorpusError(f"{self.path} is missing, its index is there. Build the corpus again.")
        size, expected = self.path.stat().st_size, tokens * dtype.itemsize
        if size != expected:
            raise CorpusError(
                f"{self.path} has {size} bytes instead of {expected}: it was cut or changed. Build the corpus again."
            )
        self.ids = torch.from_file(str(self.path), shared=False, size=tokens, dtype=dtype)

    def verify(self) -> None:
        """Read every byte and compare with the checksum."""
        if _file_checksum(self.path) != self.checksum:
            raise CorpusError(f"{self.path} is damaged: its checksum does not match. Build the corpus again.")


class TokenStream:
    """The documents of a folder of shards, one after another: ids by position, documents by number."""

    def __init__(self, folder: Path, verify: bool = True):
        indices = sorted(folder.glob("shard-*.json"))
        if not indices:
            raise CorpusError(f"{folder} has no shards")
        self.shards = [Shard(path) for path in indices]
        if verify:
            for shard in self.shards:
                shard.verify()
        self.starts = [0, *accumulate(len(shard.ids) for shard in self.shards)]
        bases = zip(self.starts, self.shards, strict=False)
        # Documents of the whole stream: ends[i] is one beyond the last token of document i.
        self.ends = torch.tensor([base + end for base, shard in bases for end in shard.ends])

    def __len__(self) -> int:
        """Number of tokens."""
        return self.starts[-1]

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.ends)

    @property
    def checksum(self) -> str:
        """Twelve hex digits that tell these tokens from any others."""
        return _checksum(shard.checksum.encode() for shard in self.shards)[:12]

    def read(self, start: int, end: int) -> Tensor:
        """The ids in [start, end), int64."""
        if not 0 <= start <= end <= len(self):
            raise IndexError(f"[{start}, {end}) is not within the {len(self)} tokens")
        parts = []
        number = max(0, bisect_right(self.starts, start) - 1)
        while start < end:
            base, shard = self.starts[number], self.shards[number]
            stop = min(end, base + len(shard.ids))
            parts.append(shard.ids[start - base : stop - base].to(torch.int64))
            start, number = stop, number + 1
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def document(self, number: int) -> Tensor:
        """The ids of a whole document, its marks included."""
        start, end = self._bounds(number)
        return self.read(start, end)

    def document_lengths(self) -> Tensor:
        """(documents,) tokens of each."""
        return self.ends.diff(prepend=torch.zeros(1, dtype=self.ends.dtype))

    def document_numbers(self, start: int, end: int) -> Tensor:
        """The document of every position in [start, end)."""
        return torch.searchsorted(self.ends, torch.arange(start, end), right=True)

    def _bounds(self, number: int) -> tuple[int, int]:
        start = 0 if number == 0 else int(self.ends[number - 1])
        return start, int(self.ends[number])


def _make_file(path: Path, size: int) -> None:
    """A file of `size` bytes that are on the disk: one mapped without them ends the process where the disk is full."""
    with path.open("wb") as file:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)


def _file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return _checksum(iter(lambda: file.read(1 << 22), b""))


def _checksum_of_ends(ends: Sequence[int]) -> str:
    return _checksum([json.dumps(ends).encode()])


def _checksum(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
