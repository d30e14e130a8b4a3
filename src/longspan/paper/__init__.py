"""The paper's tables as data. "Long-Context Generalization with Sparse Attention", Vasylenko et al., ICLR 2026."""

from longspan.paper.tables import Note, PaperTable, RowKey, get_table, table_names

__all__ = ["Note", "PaperTable", "RowKey", "get_table", "table_names"]
