"""Decoding over a cache against the oracle: in Triton's interpreter on a CPU, compiled on a GPU, by the same tests."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from long_problems import Content, equal_maxima, level, noise, one_large, ties, topics
from torch import Tensor

from longspan import attention
from longspan.functional.decode import CacheRules, PageSummary, decode, dense_decode_scores
from longspan.kernels.pages import PAGE

decode_ops: Any = pytest.importorskip("longspan.kernels.decode_ops")

ON_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="too much for the interpreter")
DTYPES = [torch.float32, torch.bfloat16 if ON_GPU else torch.float16]  # bf16 is silently wrong in the interpreter


@dataclass(frozen=True)
class Step:
    """One decoding step."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    queries: int = 1
    room: int = 300
    dim: int = 16
    value_dim: int = 16
    alpha: float = 1.5
    slopes: tuple[float, ...] | None = None
    scaled: bool = False
    scale: float | None = None
    lengths: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None
    paged: bool = False
    logits: float = 2.0
    content: Content = noise


ALPHAS = (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 4.0, 8.0, 64.0)
STEPS: dict[str, Step] = {
    **{f"alpha_{alpha}": Step(alpha=alpha) for alpha in ALPHAS},
    **{f"{room}_keys": Step(room=room) for room in (1, 63, 64, 65, 700)},
    **{f"{queries}_queries": Step(queries=queries, heads=4, room=200) for queries in (2, 3)},
    "16_queries": Step(queries=16, heads=1, room=100),
    "more_rows_than_a_tile": Step(queries=16, heads=5, room=66, alpha=1.0),
    "more_queries_than_keys": Step(queries=7, room=3),
    "heads_in_groups": Step(heads=6, kv_heads=2, room=130),
    "heads_of_their_own": Step(heads=3, kv_heads=3, room=130),
    "odd_dims": Step(dim=24, value_dim=40),
    "wide_heads": Step(dim=128, value_dim=256, room=130),
    "slopes": Step(heads=4, kv_heads=2, slopes=(1.0, 0.5, 0.0, 0.1), queries=2),
    "slopes_alpha_1.25": Step(slopes=(4.0, 2.0), alpha=1.25, room=500),
    "slopes_of_softmax": Step(slopes=(8.0, 6.0), alpha=1.0, room=500),
    "a_negative_slope": Step(slopes=(-0.5, 0.2)),
    "a_scale_for_every_query": Step(scaled=True, queries=2, room=130, slopes=(0.5, 0.0)),
    "negative_scale": Step(scale=-0.5, slopes=(0.5, 0.0)),
    "scale_0": Step(scale=0.0),
    "lengths": Step(batch=3, lengths=(200, 1, 64), room=200, queries=2),
    "a_sequence_without_keys": Step(batch=3, lengths=(0, 70, 0)),
    "starts": Step(batch=3, starts=(1, 70, 129), room=130, queries=2),
    "starts_and_lengths": Step(batch=2, starts=(63, 70), lengths=(64, 200), room=200, slopes=(0.3, 0.0)),
    "pages": Step(batch=2, lengths=(150, 65), room=192, paged=True, queries=2, slopes=(2.0, 1.0)),
    "pages_of_softmax": Step(batch=2, lengths=(150, 64), room=192, paged=True, alpha=1.0),
    "topics": Step(room=600, content=topics(64)),
    "topics_of_sparsemax": Step(room=600, content=topics(64), alpha=2.0),
    "ties": Step(content=ties, room=700),
    "ties_alpha_2.5": Step(content=ties, room=200, alpha=2.5),
    "equal_maxima": Step(content=equal_maxima),
    "nearly_uniform": Step(logits=0.01, room=500),
    "nearly_uniform_softmax": Step(logits=0.01, room=500, alpha=1.0),
    "scores_near_-1000": Step(content=level(-1e3)),
    "scores_near_1000": Step(content=level(1e3)),
    "one_score_of_10000": Step(content=one_large, alpha=1.75),
}
LARGE = {
    "one_sequence": Step(heads=32, kv_heads=8, dim=128, value_dim=128, room=40_000),
    "nape": Step(
        heads=32, kv_heads=8, dim=128, value_dim=128, room=70_000, slopes=(*(1 / h for h in range(1, 17)), *[0.0] * 16)
    ),
    "a_batch": Step(batch=5, heads=8, kv_heads=2, dim=64, value_dim=64, room=9000, lengths=(9000, 1, 777, 8999, 0)),
    "sixteen_queries": Step(queries=16, heads=8, kv_heads=2, dim=128, value_dim=128, room=20_000),
    "a_million_ties": Step(content=ties, heads=1, room=(1 << 20) + 7),
    "softmax": Step(heads=8, kv_heads=2, dim=64, value_dim=64, room=33_333, alpha=1.0, logits=1.0),
    "sparsemax": Step(heads=8, kv_heads=2, dim=64, value_dim=64, room=33_333, alpha=2.0),
    "alpha_1.3": Step(heads=8, kv_heads=2, dim=64, value_dim=64, room=33_333, alpha=1.3),
}


def made(step: Step, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The arguments of `decode`; beyond the lengths the cache holds NaN."""
    generator = torch.Generator().manual_seed(step.room * 101 + step.queries)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = gaussian(step.batch, step.heads, step.queries, step.dim) * step.logits
    k = gaussian(step.batch, step.kv_heads, step.room, step.dim)
    v = gaussian(step.batch, step.kv_heads, step.room, step.value_dim)
    if step.content is not noise:
        q, k = step.content(q, k)
    call: dict[str, Any] = {"alpha": step.alpha, "scale": step.scale}
    if step.slopes is not None:
        call["slopes"] = torch.tensor(step.slopes)
    if step.scaled:
        call["scales"] = gaussian(step.batch, step.heads, step.queries).abs().to(dtype)
    if step.starts is not None:
        call["starts"] = torch.tensor(step.starts)
    k, v = k.clone(), v.clone()
    if step.lengths is not None:
        call["lengths"] = torch.tensor(step.lengths)
        for item, length in enumerate(step.lengths):
            k[item, :, length:] = v[item, :, length:] = torch.nan
    if step.paged:
        call |= paged(k, v, generator)
        k, v = call.pop("k"), call.pop("v")
    call |= {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in call.items()}


def paged(k: Tensor, v: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """The same cache as pages strewn over pools with pages to spare."""
    batch, pages = len(k), k.shape[2] // PAGE
    table = torch.randperm(batch * pages + 3, generator=generator)[: batch * pages].view(batch, pages)
    pools = {}
    for name, cache in (("k", k), ("v", v)):
        pool = torch.full((batch * pages + 3, cache.shape[1], PAGE, cache.shape[3]), torch.nan, dtype=cache.dtype)
        pool[table] = cache.unflatten(2, (pages, PAGE)).transpose(1, 2)
        pools[name] = pool
    return pools | {"table": table.int()}


def in_float64(call: dict[str, Any]) -> dict[str, Any]:
    floats = {name: value.double() for name, value in call.items() if isinstance(value, Tensor)}
    return call | {name: floats[name] for name in floats if call[name].is_floating_point()}


def summary_of(call: dict[str, Any], boxes: bool) -> PageSummary:
    """The largest norm of every page and the least and greatest of every channel, written out; beyond the keys NaN."""
    k = call["k"]
    if "table" not in call:
        k = torch.nn.functional.pad(k, (0, 0, 0, -k.shape[2] % PAGE), value=torch.nan).unflatten(2, (-1, PAGE))
    norms = torch.linalg.vector_norm(k.float(), dim=-1).nan_to_num(0).amax(-1)
    low, high = k.nan_to_num(torch.inf, torch.inf, -torch.inf), k.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    return PageSummary(norms, low.amin(-2), high.amax(-2)) if boxes else PageSummary(norms)


def tolerance(call: dict[str, Any], exact: Tensor) -> float:
    """Three times the error of the dense computation, and the rounding of weights to the dtype of the values."""
    plain = decode(**call, impl="reference")
    rounding = torch.finfo(call["q"].dtype).eps * (6 if call["q"].dtype == torch.float32 else 2)
    if 1.5 < call["alpha"] < 2:  # an ulp of the threshold moves a small weight by its root
        rounding = max(rounding, 0.1 * (6 * torch.finfo(torch.float32).eps) ** 0.5)
    return 3 * float((plain.double() - exact).abs().max()) + rounding * max(1.0, float(exact.abs().max()))


def assert_is_the_oracles(call: dict[str, Any], **options: Any) -> None:
    exact = decode(**in_float64(call), impl="reference")
    found = decode(**call, **options, impl="triton")
    assert found.isfinite().all()
    error = float((found.double() - exact).abs().max())
    assert error <= tolerance(call, exact), f"{error:.3g} > {tolerance(call, exact):.3g}"


def in_every_dtype() -> list[Any]:
    """Every step in every dtype, in the interpreter only where half precision is something new."""
    table = []
    for name in STEPS:
        new = name.startswith(("alpha_1.0", "alpha_1.5", "alpha_2", "ties", "scores", "wide", "a_scale"))
        for dtype in DTYPES if ON_GPU or new else DTYPES[:1]:
            table.append(pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}"))
    return table


@pytest.mark.parametrize(("name", "dtype"), in_every_dtype())
def test_as_close_to_the_oracle_as_plain_torch(name: str, dtype: torch.dtype, device: torch.device) -> None:
    call = made(STEPS[name], dtype, device)
    assert_is_the_oracles(call)


@pytest.mark.parametrize(("name", "boxes"), [("pages", False), ("pages", True), ("topics", True), ("slopes", False)])
def test_what_is_known_of_pages_changes_no_bit(name: str, boxes: bool, device: torch.device) -> None:
    call = made(STEPS[name], DTYPES[1], device)
    known = decode(**call, summary=summary_of(call, boxes), impl="triton")
    assert torch.equal(known, decode(**call, impl="triton"))


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_long_caches_are_as_close_as_plain_torch(name: str, dtype: torch.dtype, device: torch.device) -> None:
    call = made(LARGE[name], dtype, device)
    assert_is_the_oracles(call)
    for boxes in (False, True):
        known = decode(**call, summary=summary_of(call, boxes), impl="triton")
        assert torch.equal(known, decode(**call, impl="triton"))


@pytest.mark.parametrize("name", ["lengths", "starts", "starts_and_lengths", "a_scale_for_every_query", "pages"])
def test_the_dense_step_is_attention_of_every_sequence_alone(name: str) -> None:
    step = STEPS[name]
    call = made(step, torch.float64, torch.device("cpu"))
    found = decode(**call, impl="reference")
    plain = made(replace(step, paged=False), torch.float64, torch.device("cpu"))
    for item in range(step.batch):
        end = step.room if step.lengths is None else step.lengths[item]
        start = 0 if step.starts is None else step.starts[item]
        q = plain["q"][item : item + 1]
        if step.scaled:
            q = q * plain["scales"][item, ..., None]
        k, v = (plain[name][item : item + 1, :, start:end] for name in "kv")
        slopes = None if step.slopes is None else plain["slopes"].double()
        expected = attention(q, k, v, alpha=step.alpha, slopes=slopes, scale=step.scale, impl="reference")
        assert torch.allclose(found[item], expected[0], atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name", ["alpha_1.0", "alpha_1.25", "alpha_1.5", "alpha_2.0", "alpha_2.5", "alpha_8.0", "slopes", "lengths"]
)
def test_stats_are_those_of_the_oracle(name: str, dtype: torch.dtype, device: torch.device) -> None:
    call = made(STEPS[name], dtype, device)
    _, found = decode(**call, impl="triton", return_stats=True)
    _, exact = decode(**in_float64(call), impl="reference", return_stats=True)
    sees = exact.tau < torch.inf
    assert torch.equal(found.tau < torch.inf, sees)
    for key in ("tau", "entropy", "largest"):
        value = getattr(exact, key)[sees]
        error = (getattr(found, key)[sees] - value).abs().max()
        assert error <= 2e-5 * value.abs().max().clamp_min(1.0), key
    assert torch.equal(found.support, exact.support)
    assert found.block_sparsity is not None
    assert ((found.block_sparsity >= 0) & (found.block_sparsity <= 1)).all()


def rows_of(call: dict[str, Any], boxes: bool) -> tuple[Tensor, Tensor]:
    """How far the highest score of every page lies above its row's threshold, and which pages were not read."""
    exact = in_float64(call)
    options = {key: exact.get(key) for key in ("slopes", "scales", "lengths", "starts")}
    scale = exact["scale"] if exact["scale"] is not None else exact["q"].shape[3] ** -0.5
    k = exact["k"]
    if "table" in call:
        k = k[call["table"].long()].transpose(1, 2).flatten(2, 3)
    scores, _ = dense_decode_scores(exact["q"], k, CacheRules(scale=scale, **options))
    _, stats = decode(**exact, impl="reference", return_stats=True)
    above = (call["alpha"] - 1) * scores - stats.tau[..., None]
    if call["alpha"] == 1:  # what underflows in float32
        above = torch.where(scores == -torch.inf, -torch.inf, scores - scores.amax(-1, keepdim=True) + 103.5)
    above = torch.nn.functional.pad(above, (0, -above.shape[-1] % PAGE), value=-torch.inf)
    tops = decode_ops.Decoded(*decode_ops.decode_attention(*arguments(call, boxes))).tops
    return above.unflatten(-1, (-1, PAGE)).amax(-1), tops.amax(4).view(*call["q"].shape[:3], -1) == -torch.inf


def arguments(call: dict[str, Any], boxes: bool) -> tuple[Any, ...]:
    scale = call["scale"] if call["scale"] is not None else call["q"].shape[3] ** -0.5
    options = (call.get(name) for name in ("slopes", "scales", "lengths", "starts", "table"))
    return (call["q"], call["k"], call["v"], *options, *summary_of(call, boxes), call["alpha"], scale, True)


WINDOWS = {
    "windows": Step(heads=4, kv_heads=2, slopes=(2.0, 1.0, 0.7, 0.5), room=900),
    "wide_windows": Step(heads=2, slopes=(0.05, 0.06), room=1900),
    "windows_of_few_queries": Step(heads=2, slopes=(2.0, 1.0), room=700, queries=3),
    "windows_in_pages": Step(batch=2, slopes=(2.0, 1.0), room=640, lengths=(640, 500), paged=True),
    "windows_of_alpha_2": Step(slopes=(1.0, 1.0), room=700, alpha=2.0),
    "windows_of_large_scales": Step(slopes=(3.0, 3.0), room=700, scaled=True, logits=4.0),
    "windows_of_a_negative_scale": Step(slopes=(2.0, 3.0), room=700, scale=-0.3),
}
TOPICS = {
    "topics": Step(room=900, content=topics(PAGE)),
    "topics_of_few_queries": Step(room=700, content=topics(PAGE), queries=3),
    "topics_in_pages": Step(batch=2, room=640, lengths=(640, 300), content=topics(PAGE), paged=True),
    "topics_of_alpha_1.25": Step(room=700, content=topics(PAGE), alpha=1.25, scale=1.0),
    "topics_of_negative_scales": Step(room=700, content=topics(PAGE), scale=-1.0),
    "topics_and_slopes": Step(room=900, content=topics(PAGE), slopes=(0.001, 0.0), starts=(100,)),
    "topics_of_softmax": Step(room=700, content=topics(PAGE), alpha=1.0, scale=4.0),
}


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else DTYPES[1:], ids=str)
@pytest.mark.parametrize(
    ("name", "boxes"), [*((name, False) for name in WINDOWS), ("windows", True), *((name, True) for name in TOPICS)]
)
def test_a_page_that_is_not_read_holds_no_survivor(
    name: str, boxes: bool, dtype: torch.dtype, device: torch.device
) -> None:
    call = made((WINDOWS | TOPICS)[name], dtype, device)
    above, unread = rows_of(call, boxes)
    visible = above > -torch.inf
    assert (unread & visible).any(), "nothing is skipped, so nothing is tested"
    assert (above[unread] <= 0).all()
    assert_is_the_oracles(call, summary=summary_of(call, boxes))


def test_one_page_in_a_hundred_is_read_under_steep_slopes(device: torch.device) -> None:
    call = made(Step(heads=2, slopes=(3.0, 4.0), room=100 * PAGE), torch.float32, device)
    _, unread = rows_of(call, boxes=False)
    assert unread.float().mean() >= 0.98


def test_a_page_in_four_is_read_where_one_topic_in_four_is_wanted(device: torch.device) -> None:
    call = made(Step(heads=1, content=topics(PAGE), room=100 * PAGE), torch.float32, device)
    _, unread = rows_of(call, boxes=True)
    assert 0.6 < float(unread.float().mean()) <= 0.75


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_give_the_bits_of_one_piece(dtype: torch.dtype, device: torch.device) -> None:
    step = STEPS["pages"]
    in_pages, whole = made(step, dtype, device), made(replace(step, paged=False), dtype, device)
    assert torch.equal(decode(**in_pages, impl="triton"), decode(**whole, impl="triton"))


def test_room_to_spare_changes_no_more_than_the_order_of_sums(device: torch.device) -> None:
    call = made(Step(batch=2, lengths=(100, 90), room=100, slopes=(1.0, 0.0)), torch.float32, device)
    roomy = dict(call)
    for name in "kv":
        roomy[name] = torch.nn.functional.pad(call[name], (0, 0, 0, 900), value=torch.nan)
    assert torch.allclose(decode(**roomy, impl="triton"), decode(**call, impl="triton"), atol=1e-6)


def test_the_same_bits_from_every_layout_and_again(device: torch.device) -> None:
    call = made(Step(room=130, slopes=(0.5, 0.0)), DTYPES[1], device)
    first = decode(**call, impl="triton")
    for lay_out in (
        lambda heads: heads,
        lambda heads: heads.transpose(1, 2).contiguous().transpose(1, 2),
        lambda heads: heads.mT.contiguous().mT,
    ):
        strided = call | {name: lay_out(call[name]) for name in "qkv"}
        assert torch.equal(decode(**strided, impl="triton"), first)


def test_a_row_that_sees_nothing_is_zero(device: torch.device) -> None:
    call = made(Step(batch=3, lengths=(0, 70, 5), starts=(0, 0, 5), queries=2), torch.float32, device)
    out, stats = decode(**call, impl="triton", return_stats=True)
    assert (out[[0, 2]] == 0).all()
    assert (stats.tau[[0, 2]] == torch.inf).all()
    assert (stats.support[[0, 2]] == 0).all()
    assert (stats.entropy[[0, 2]] == 0).all()
    assert (stats.support[1] > 0).all()


@pytest.mark.parametrize("alpha", [1.0, 1.5, 8.0])
def test_attention_of_few_queries_and_many_keys_is_decoding(alpha: float, device: torch.device) -> None:
    call = made(Step(room=1100, queries=2, slopes=(0.5, 0.0), alpha=alpha), torch.float32, device)
    found, stats = attention(**call, impl="triton", return_stats=True)
    decoded, _ = decode(**call, impl="triton", return_stats=True)  # on a GPU stats are another kernel, of other bits
    assert torch.equal(found, decoded)
    _, expected = attention(**in_float64(call), impl="reference", return_stats=True)
    assert torch.equal(stats.support, expected.support) or alpha == 1
    assert stats.impl == "triton"


def test_attention_that_is_differentiated_is_not_decoding(device: torch.device) -> None:
    call = made(Step(room=1100), torch.float32, device)
    call["v"].requires_grad_()
    out = attention(**call, impl="triton")
    assert out.requires_grad
    expected = attention(**in_float64(call), impl="reference")
    assert torch.allclose(out.double(), expected, atol=1e-5)


@pytest.mark.parametrize(
    "step",
    [Step(alpha=1.0, room=70), Step(room=128, slopes=(0.5, 0.0), lengths=(120,), paged=True)],
    ids=["one", "paged"],
)
def test_the_operator_is_registered_well(step: Step, device: torch.device) -> None:
    torch.library.opcheck(decode_ops.decode_attention, arguments(made(step, torch.float32, device), step.paged))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"k": torch.zeros(1, 1, 9, 4, dtype=torch.float64)}, "one dtype"),
    "dims": ({"q": torch.zeros(2, 1, 4)}, "4 dims"),
    "values": ({"v": torch.zeros(1, 1, 8, 4)}, "do not fit"),
    "heads": ({"q": torch.zeros(1, 3, 1, 4), "k": torch.zeros(1, 2, 9, 4), "v": torch.zeros(1, 2, 9, 4)}, "divide"),
    "batch": ({"q": torch.zeros(2, 2, 1, 4)}, "agree in batch"),
    "slopes": ({"slopes": torch.zeros(3)}, "slopes must have shape"),
    "lengths": ({"lengths": torch.zeros(2)}, "lengths must have shape"),
    "starts": ({"starts": torch.zeros(1)}, "must be integers"),
    "scales": ({"scales": torch.zeros(1, 2)}, "scales must have shape"),
    "summary": ({"summary": PageSummary(torch.zeros(1, 1, 2))}, "summary.norms must have shape"),
    "half_a_box": ({"summary": PageSummary(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, 4))}, "both low and high"),
    "pool": ({"table": torch.zeros(1, 1, dtype=torch.int32)}, "pages of 64"),
    "alpha": ({"alpha": 0.5}, ">= 1"),
    "impl": ({"impl": "flash"}, "must be 'auto'"),
    "queries": ({"q": torch.zeros(1, 2, 17, 4), "impl": "triton"}, "at most 16 queries"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused(name: str, device: torch.device) -> None:
    call: dict[str, Any] = {"q": torch.zeros(1, 2, 1, 4), "k": torch.zeros(1, 1, 9, 4), "v": torch.zeros(1, 1, 9, 4)}
    changed, message = WRONG[name]
    call |= changed
    call = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in call.items()}
    if "summary" in call:
        norms, *box = (None if part is None else part.to(device) for part in call["summary"])
        assert norms is not None
        call["summary"] = PageSummary(norms, *box)
    with pytest.raises(ValueError, match=message):
        decode(**call)


@pytest.mark.parametrize(
    ("table", "lengths", "message"),
    [
        (torch.zeros(1, 1, dtype=torch.int32), None, "needs lengths"),
        (torch.zeros(1, 1, dtype=torch.int64), torch.tensor([3]), "int32"),
        (torch.zeros(2, 1, dtype=torch.int32), torch.tensor([3]), "int32"),
    ],
    ids=["lengths", "dtype", "batch"],
)
def test_a_wrong_table_is_refused(table: Tensor, lengths: Tensor | None, message: str) -> None:
    pool = torch.zeros(3, 1, PAGE, 4)
    with pytest.raises(ValueError, match=message):
        decode(torch.zeros(1, 2, 1, 4), pool, pool, table=table, lengths=lengths)


@needs_gpu
@pytest.mark.parametrize("alpha", [1.0, 1.5, 1.75])
def test_a_captured_step_serves_every_length(alpha: float, device: torch.device) -> None:
    step = Step(batch=2, heads=8, kv_heads=2, dim=64, value_dim=64, room=5000, lengths=(5000, 17), alpha=alpha)
    call = made(step, DTYPES[1], device)
    call |= {name: call[name].nan_to_num(0) for name in "kv"}
    decode(**call, impl="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(**call, impl="triton")
    for lengths in ((5000, 17), (1, 4999), (64, 65)):
        call["lengths"].copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, decode(**call, impl="triton"))


@needs_gpu
def test_compiles_whole(device: torch.device) -> None:
    call = made(Step(heads=8, kv_heads=2, dim=64, value_dim=64, room=5000), DTYPES[1], device)
    compiled = torch.compile(lambda q, k, v: decode(q, k, v), fullgraph=True, dynamic=True)
    for room in (5000, 3000, 4097):
        q, k, v = call["q"], call["k"][:, :, :room], call["v"][:, :, :room]
        assert torch.equal(compiled(q, k, v), decode(q, k, v))
