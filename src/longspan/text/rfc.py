"""RFCs as prose: pages joined, headers, footers, tables of contents and figures dropped.

Debian's packages doc-rfc-* (component non-free, version 20230121) put 8,917 text files under /usr/share/doc/RFC; they
make 8,882 documents and 360 MB of prose.

    ... a client that does not wish to                     ... a client that does not wish to
                                                           receive the message MUST say so.
    Doe              Standards Track         [Page 7]  ->
    RFC 9999             Examples          March 2024
    receive the message MUST say so.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from longspan.text.documents import Source, from_folder

_FOOTER = re.compile(r"\[Page [0-9ivx]+\]\s*$", re.IGNORECASE)
_HEADER = re.compile(r"^\s*(RFC|Request for Comments:?) \d+\s.*\d{4}\s*$")
_CONTENTS = re.compile(r"(\.{3,}|(\. ){3,})\s*[0-9ivx]*\s*$")
_LEAST_LETTERS = 0.7  # of the characters of a block that are not blanks; drawings and tables of bits have fewer
_SENTENCE_END = (".", ":", ";", "?", "!")


def from_rfcs(folder: Path) -> Source:
    """The RFCs (text files, also .gz) under a folder."""
    read = from_folder(folder)

    def cleaned(counts: Counter[str]) -> Iterator[str]:
        return map(prose, read(counts))

    return cleaned


def prose(text: str) -> str:
    """The prose of an RFC, its paragraphs without indentation."""
    blocks = re.split(r"\n\s*\n", _joined_pages(text))
    kept = (_unindented(block) for block in blocks if not _is_figure(block))
    return "\n\n".join(block for block in kept if block)


def _joined_pages(text: str) -> str:
    """The lines of all pages; a sentence that a page cut goes on."""
    lines: list[str] = []
    broken = False
    for line in text.replace("\r", "").replace("\f", "").split("\n"):
        if _FOOTER.search(line) or (_HEADER.match(line) and _at_a_break(lines, broken)):
            broken = True
        elif not broken:
            lines.append(line.rstrip())
        elif line.strip():
            broken = False
            while lines and not lines[-1]:
                lines.pop()
            goes_on = lines and not lines[-1].endswith(_SENTENCE_END) and line.lstrip()[0].islower()
            lines += [line.rstrip()] if goes_on else ["", line.rstrip()]
    return "\n".join(lines)


def _at_a_break(lines: list[str], broken: bool) -> bool:
    """Whether a line that looks like a page's header stands where one can: after a footer or an empty line."""
    return broken or not lines or not lines[-1]


def _is_figure(block: str) -> bool:
    visible = [character for character in block if not character.isspace()]
    if not visible or any(_CONTENTS.search(line) for line in block.split("\n")):
        return True
    return sum(character.isalpha() for character in visible) < _LEAST_LETTERS * len(visible)


def _unindented(block: str) -> str:
    return "\n".join(line.strip() for line in block.split("\n")).strip()
