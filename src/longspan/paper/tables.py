"""Every synthetic table of the paper by name; a table of the main text is called `main/` and the task."""

from longspan.paper import generative, main_text, max_retrieval, single_answer
from longspan.paper.format import Note, PaperTable, RowKey

__all__ = ["MAX_RETRIEVAL", "Note", "PaperTable", "RowKey", "get_table", "table_names"]

MAX_RETRIEVAL = PaperTable(
    name="max_retrieval",
    caption="Accuracy (%) on Max Retrieval",
    metric="accuracy",
    lengths=max_retrieval.LENGTHS,
    rows={RowKey("none", method): row for method, row in max_retrieval.ACCURACY.items()},
    notes=(Note("The model has no positions, and its methods are the demo's, not those of the decoder."),),
)

_TABLES = {table.name: table for table in (*main_text.TABLES, *generative.TABLES, *single_answer.TABLES, MAX_RETRIEVAL)}


def table_names() -> list[str]:
    """Names that `get_table` knows, the main text first."""
    return list(_TABLES)


def get_table(name: str) -> PaperTable:
    """A table of the paper; those of the appendix are called by the task."""
    if name not in _TABLES:
        raise ValueError(f"the paper has no table {name!r}; there are {', '.join(_TABLES)}")
    return _TABLES[name]
