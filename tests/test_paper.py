"""The paper's tables: whole, in range, and in agreement with each other but for the slips that are noted."""

import pytest

from longspan.paper import PaperTable, get_table, max_retrieval, table_names
from longspan.paper.format import RowKey, doubling, parse_rows
from longspan.tasks import get_task, task_names

TABLES = [get_table(name) for name in table_names()]
MAIN = [table for table in TABLES if table.name.startswith("main/")]
DECODER = [table for table in TABLES if table.name not in ("max_retrieval", "rope_factor")]

METHODS = {
    *("softmax", "ssmax", "assmax", "entmax", "sentmax", "asentmax"),
    *("topk_16", "topk_32", "topk_half", "stick_breaking"),
}
POSITIONS = {"rope", "nope", "alibi", "nape"}

# name: rows, lengths, cells that the paper leaves empty
SHAPES = {
    "main/mqmtar": (5, 7, 0),
    "main/reverse": (5, 5, 0),
    "main/copy": (5, 7, 0),
    "main/sort": (5, 4, 0),
    "mqmtar": (18, 11, 0),
    "copy": (20, 7, 1),
    "reverse": (21, 5, 0),
    "sort": (19, 4, 0),
    "2back": (12, 7, 0),
    "local_count": (14, 6, 0),
    "flip_flop_sparse": (10, 10, 12),
    "flip_flop_dense": (8, 7, 0),
    "rope_factor": (5, 7, 0),
    "max_retrieval": (18, 9, 0),
}

SPOTS = [
    ("mqmtar", "nape", "asentmax", 65536, 95.3),
    ("mqmtar", "nape", "assmax", 16384, 85.2),
    ("mqmtar", "nope", "stick_breaking", 8192, 68.6),
    ("mqmtar", "alibi", "entmax", 1024, 44.7),
    ("copy", "nape", "ssmax", 4096, 95.8),
    ("copy", "nape", "sentmax", 2048, 69.7),
    ("copy", "rope", "entmax", 2048, 0.0),
    ("copy", "rope", "entmax", 4096, None),
    ("reverse", "nape", "asentmax", 512, 56.7),
    ("reverse", "nape", "topk_half", 256, 68.9),
    ("reverse", "alibi", "entmax", 128, 78.5),
    ("sort", "nape", "asentmax", 256, 79.7),
    ("sort", "nope", "topk_16", 64, 99.7),
    ("2back", "rope", "ssmax", 4096, 69.0),
    ("2back", "nope", "asentmax", 128, 90.3),
    ("local_count", "nope", "softmax", 4096, 4.6),
    ("local_count", "nape", "ssmax", 2048, 99.8),
    ("flip_flop_sparse", "rope", "ssmax", 2048, 22.0),
    ("flip_flop_sparse", "rope", "ssmax", 8192, None),
    ("flip_flop_sparse", "nape", "asentmax", 32768, 99.5),
    ("flip_flop_dense", "rope", "entmax", 256, 73.6),
    ("rope_factor", "rope_factor_16", "softmax", 256, 97.3),
    ("rope_factor", "rope_unscaled", "softmax", 128, 79.9),
    ("main/mqmtar", "nape", "topk_32", 256, 6.2),
    ("main/reverse", "nape", "entmax", 256, 28.5),
    ("max_retrieval", "none", "asentmax, gamma 3", 4096, 62.7),
    ("mqmtar", "nape", "softmax", 65, None),
    ("mqmtar", "rope", "topk_16", 64, None),
]


@pytest.mark.parametrize("table", TABLES, ids=table_names())
def test_tables_are_whole(table: PaperTable) -> None:
    num_rows, num_lengths, empty = SHAPES[table.name]
    assert (len(table.rows), len(table.lengths)) == (num_rows, num_lengths)
    assert sum(len(row) for row in table.rows.values()) == num_rows * num_lengths - empty
    assert list(table.lengths) == sorted(set(table.lengths))
    assert table.caption
    for row in table.rows.values():
        assert set(row) <= set(table.lengths)
        assert all(0 <= value <= 100 and round(value, 1) == value for value in row.values())


def test_nothing_is_missing_or_unknown() -> None:
    assert table_names() == list(SHAPES)
    with pytest.raises(ValueError, match="no table 'mqmtra'; there are main/mqmtar,"):
        get_table("mqmtra")


@pytest.mark.parametrize("table", DECODER, ids=lambda table: table.name)
def test_rows_are_called_as_the_methods_are(table: PaperTable) -> None:
    assert {key.position for key in table.rows} <= POSITIONS
    assert {key.method for key in table.rows} <= METHODS
    assert all(key.position == "nope" for key in table.rows if key.method == "stick_breaking")


@pytest.mark.parametrize("table", DECODER, ids=lambda table: table.name)
def test_tables_fit_their_tasks(table: PaperTable) -> None:
    task = get_task(table.name.removeprefix("main/"))
    assert table.metric == task.metric
    assert table.lengths[0] == task.train_lengths[1]
    for length in table.lengths:
        task.check_length(length)


def test_every_task_but_the_probes_has_a_table() -> None:
    assert set(task_names()) - set(table_names()) == {"delayed_copy"}


@pytest.mark.parametrize(("name", "position", "method", "length", "value"), SPOTS)
def test_cells(name: str, position: str, method: str, length: int, value: float | None) -> None:
    assert get_table(name).cell(position, method, length) == value


@pytest.mark.parametrize("table", MAIN, ids=lambda table: table.name)
def test_the_main_text_is_a_part_of_the_appendix(table: PaperTable) -> None:
    appendix = get_table(table.name.removeprefix("main/"))
    differ = {
        (position, method, length)
        for (position, method), row in table.rows.items()
        for length, value in row.items()
        if appendix.cell(position, method, length) != value
    }
    noted = {cell for note in table.notes if "appendix has" in note.text for cell in note.cells}
    assert differ == noted


def test_the_slips_are_as_noted() -> None:
    copied = [list(get_table(name).rows[RowKey("nape", "entmax")].values())[:5] for name in ("copy", "reverse")]
    assert copied[0] == copied[1]
    main, appendix = get_table("main/mqmtar"), get_table("mqmtar")
    for method in ("ssmax", "asentmax"):
        assert main.cell("nape", method, 1024) == appendix.cell("nape", method, 2048)
    assert main.cell("nape", "topk_32", 256) == appendix.cell("nape", "topk_32", 1024)
    sort = get_table("sort")
    assert get_table("main/sort").rows[RowKey("nape", "topk_32")] == sort.rows[RowKey("nope", "topk_32")]
    sparse = get_table("flip_flop_sparse")
    ablation = get_table("rope_factor").rows[RowKey("rope_factor_16", "softmax")]
    differ = {length for length, value in ablation.items() if sparse.cell("rope", "softmax", length) != value}
    assert differ == {length for note in sparse.notes for _, _, length in note.cells}


@pytest.mark.parametrize("table", TABLES, ids=table_names())
def test_notes_are_about_cells_of_their_table(table: PaperTable) -> None:
    for note in table.notes:
        assert note.text
        for position, method, length in note.cells:
            assert RowKey(position, method) in table.rows
            assert length in table.lengths


def test_max_retrieval_is_the_same_data() -> None:
    table = get_table("max_retrieval")
    assert table.lengths == max_retrieval.LENGTHS
    assert {key.method: row for key, row in table.rows.items()} == max_retrieval.ACCURACY


def test_rows_are_read_strictly() -> None:
    assert doubling(64, 256) == (64, 128, 256)
    assert parse_rows("nape softmax 1.5 -", (1, 2)) == {("nape", "softmax"): {1: 1.5}}
    with pytest.raises(ValueError, match="nape softmax: 1 cells for 2 lengths"):
        parse_rows("nape softmax 1.5", (1, 2))
    with pytest.raises(ValueError, match="two rows for nape softmax"):
        parse_rows("nape softmax 1\nnape softmax 2", (1,))
