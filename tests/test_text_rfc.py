"""RFCs as prose."""

from collections import Counter
from pathlib import Path

from longspan.text.rfc import from_rfcs, prose

RFC = """\



Network Working Group                                             J. Doe
Request for Comments: 9999                                    March 2024

                         An Example of a Protocol

Table of Contents

   1.  Introduction ................................................. 2
   2.  Messages . . . . . . . . . . . . . . . . . . . . . . . . . . . 3

1.  Introduction

   A server that has nothing to send waits, and a client that does not wish to



Doe                     Standards Track                         [Page 1]
\f
RFC 9999                    An Example                        March 2024


   receive the message MUST say so.  RFC 2119 says what the word means.

   The layout is:

    0                   1                   2                   3
    0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
   +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
   |     Type      |                    Length                     |
   +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+

   The last sentence of a page ends here.



Doe                     Standards Track                         [Page 2]
\f
RFC 9999                    An Example                        March 2024


   Another paragraph begins.
"""


def test_pages_are_joined_and_what_is_not_prose_goes() -> None:
    paragraphs = prose(RFC).split("\n\n")
    assert paragraphs[1:] == [
        "An Example of a Protocol",
        "Table of Contents",
        "1.  Introduction",
        "A server that has nothing to send waits, and a client that does not wish to\n"
        "receive the message MUST say so.  RFC 2119 says what the word means.",
        "The layout is:",
        "The last sentence of a page ends here.",
        "Another paragraph begins.",
    ]
    assert "[Page" not in prose(RFC)
    assert prose(RFC).count("March 2024") == 1  # of the title, not of the pages


def test_a_folder_of_rfcs_is_a_source(tmp_path: Path) -> None:
    (tmp_path / "rfc9999.txt").write_text(RFC)
    assert list(from_rfcs(tmp_path)(Counter())) == [prose(RFC)]
    assert prose("") == ""
