"""The appendix's tables of the tasks with a class per token or one bit as answer: 2Back, Local Count, Flip-Flop."""

from longspan.paper.format import Note, PaperTable, doubling, parse_rows

_SHORT = doubling(64, 4096)

TWO_BACK = PaperTable(
    name="2back",
    caption="Accuracy (%) on 2Back.",
    metric="accuracy",
    lengths=_SHORT,
    rows=parse_rows(
        """
        rope   softmax   100.0 100.0 100.0  99.3  81.4  63.4  41.1
        rope   ssmax     100.0 100.0 100.0  99.8  98.5  90.4  69.0
        rope   entmax    100.0  98.2  94.8  83.7  65.5  45.7  31.3
        rope   asentmax  100.0 100.0 100.0  95.0  61.2  36.2  22.1
        nope   softmax    99.9  83.2  51.4  30.1  18.5  12.7   9.7
        nope   ssmax     100.0  80.5  47.2  27.2  16.9  11.8   9.2
        nope   entmax    100.0  77.3  50.5  33.2  20.7  13.7  10.2
        nope   asentmax  100.0  90.3  55.1  36.5  24.3  16.2  11.5
        nape   softmax   100.0 100.0 100.0 100.0 100.0 100.0 100.0
        nape   ssmax     100.0 100.0 100.0 100.0 100.0 100.0 100.0
        nape   entmax    100.0 100.0 100.0 100.0 100.0 100.0 100.0
        nape   asentmax  100.0 100.0 100.0 100.0 100.0 100.0 100.0
        """,
        _SHORT,
    ),
)

_LOCAL_COUNT_LENGTHS = doubling(128, 4096)
LOCAL_COUNT = PaperTable(
    name="local_count",
    caption="Accuracy (%) on Local Count.",
    metric="accuracy",
    lengths=_LOCAL_COUNT_LENGTHS,
    rows=parse_rows(
        """
        rope   softmax   100.0  99.4  91.6  55.2  31.1  17.3
        rope   ssmax     100.0 100.0  81.3  42.6  23.0  13.4
        rope   entmax    100.0  99.9  89.3  47.1  24.9  14.1
        rope   asentmax  100.0 100.0  79.1  41.4  22.4  13.1
        nope   softmax    99.1  71.7  36.5  18.3   9.2   4.6
        nope   ssmax      99.1  71.4  36.8  18.6   9.3   4.7
        nope   entmax     99.8  80.8  45.6  25.0  13.8   7.7
        nope   asentmax   99.6  78.1  42.6  22.5  11.9   6.4
        alibi  softmax   100.0 100.0 100.0 100.0 100.0 100.0
        alibi  entmax    100.0 100.0 100.0 100.0 100.0 100.0
        nape   softmax   100.0 100.0 100.0 100.0 100.0 100.0
        nape   ssmax     100.0 100.0  99.9  99.9  99.8  99.8
        nape   entmax    100.0 100.0 100.0 100.0 100.0 100.0
        nape   asentmax  100.0 100.0 100.0 100.0 100.0 100.0
        """,
        _LOCAL_COUNT_LENGTHS,
    ),
    notes=(Note("The text draws repeats from U(1, 48), the released code from 2..48."),),
)

_SPARSE_LENGTHS = doubling(64, 32768)
FLIP_FLOP_SPARSE = PaperTable(
    name="flip_flop_sparse",
    caption="Accuracy (%) on Flip-Flop (sparse).",
    metric="exact_match",
    lengths=_SPARSE_LENGTHS,
    rows=parse_rows(
        """
        rope   softmax   100.0  99.9  97.2  36.6   0.0   0.0   0.0     -     -     -
        rope   ssmax     100.0  99.8  91.8  77.8  52.2  22.0  39.2     -     -     -
        rope   entmax    100.0  99.9  89.0  64.0  50.6  50.6  55.1     -     -     -
        rope   asentmax  100.0  99.8  98.9  51.4  51.4  50.2  49.2     -     -     -
        alibi  softmax   100.0  99.9  99.8  99.9  99.9 100.0  99.7  99.7  99.9  99.7
        alibi  entmax    100.0  99.9  99.8  99.8  99.8  99.9  99.7  99.7  99.7  99.7
        nape   softmax   100.0  99.8  99.6  99.3  99.7  99.6  99.6  99.6  99.3  99.4
        nape   ssmax     100.0  99.8  99.9  99.8  99.8  99.7  99.8 100.0  99.9  99.6
        nape   entmax    100.0  99.9  99.8  99.9  99.9 100.0  99.7  99.7  99.8  99.7
        nape   asentmax  100.0  99.8  99.6  99.3  99.5  99.3  99.5  99.7  99.6  99.5
        """,
        _SPARSE_LENGTHS,
    ),
    notes=(
        Note(
            "The ablation of the RoPE factor has 97.3 and 36.7 for the same model.",
            (("rope", "softmax", 256), ("rope", "softmax", 512)),
        ),
    ),
)

FLIP_FLOP_DENSE = PaperTable(
    name="flip_flop_dense",
    caption="Accuracy (%) on Flip-Flop (dense).",
    metric="exact_match",
    lengths=_SHORT,
    rows=parse_rows(
        """
        rope   softmax   100.0  70.2  62.2  53.2  49.2  50.3  53.1
        rope   ssmax     100.0  69.1  60.4  53.2  48.5  51.0  53.1
        rope   entmax    100.0  80.4  73.6  60.3  49.3  51.2  53.1
        rope   asentmax  100.0 100.0 100.0  49.6  48.9  51.1  53.1
        nape   softmax   100.0 100.0 100.0 100.0 100.0 100.0 100.0
        nape   ssmax     100.0 100.0 100.0 100.0 100.0 100.0 100.0
        nape   entmax    100.0 100.0 100.0 100.0 100.0 100.0 100.0
        nape   asentmax  100.0 100.0 100.0 100.0 100.0 100.0 100.0
        """,
        _SHORT,
    ),
)

ROPE_FACTOR = PaperTable(
    name="rope_factor",
    caption="Exact match accuracy (%) for ablation of LLaMA 3 RoPE scaling on Flip-Flop (sparse)",
    metric="exact_match",
    lengths=_SHORT,
    rows=parse_rows(
        """
        rope_unscaled  softmax  100.0  79.9  54.4  51.5  48.8  50.8  50.8
        rope_factor_4  softmax  100.0  99.6  33.8  11.2   3.3   0.5   0.0
        rope_factor_8  softmax  100.0 100.0  72.6   0.2   0     0     0
        rope_factor_16 softmax  100.0  99.9  97.3  36.7   0     0     0
        rope_factor_32 softmax  100.0  99.2  71.6  51.3  51.1  49.3  49.2
        """,
        _SHORT,
    ),
    notes=(Note("In every other table rope has the factor 16."),),
)

TABLES = (TWO_BACK, LOCAL_COUNT, FLIP_FLOP_SPARSE, FLIP_FLOP_DENSE, ROPE_FACTOR)
