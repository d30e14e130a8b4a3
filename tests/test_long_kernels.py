"""The kernels for rows of any length against the oracle: in Triton's interpreter on a CPU, compiled on a GPU.

Tiles are 64 x 32 in float32 and 128 x 128 in half precision, so that 130 tokens make several of either.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import STAT_NAMES, attend, attend_with_stats, call_of, gradients
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from long_problems import LARGE, PROBLEMS, ROWS, SUMS, Problem, level, one_large, square, topics
from test_kernels import dtypes, in_float64
from torch import Tensor

from longspan import attention, entmax
from longspan.functional.attention import check_rules
from longspan.functional.reference import dense_scores

ops: Any = pytest.importorskip("longspan.kernels.ops")

ON_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="too much for the interpreter")
HALF = torch.bfloat16 if ON_GPU else torch.float16  # bf16 is silently wrong in the interpreter


def in_every_dtype(problems: dict[str, Problem]) -> list[Any]:
    """Every problem in every dtype."""
    table = []
    for name, problem in problems.items():
        for dtype in dtypes():
            one_tile = problem.key_time <= 128 and not name.startswith(("alpha", "dim", "ties"))
            if one_tile and dtype == torch.float16 and not ON_GPU:
                continue  # nothing new in the interpreter
            if name == "ties_of_alpha_4.0" and dtype == torch.float16:
                continue  # the keys' gradients are beyond its range
            table.append(pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}"))
    return table


def made(problem: Problem, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The arguments of `attention`, with inputs that the dtype holds exactly."""
    call = call_of(problem)
    call["q"], call["k"] = problem.content(call["q"].detach(), call["k"].detach())
    for name, value in call.items():
        if isinstance(value, Tensor):
            floats = value.is_floating_point()
            call[name] = value.detach().contiguous().to(device, dtype if floats else None).requires_grad_(floats)
    return call


def arguments(call: dict[str, Any]) -> tuple[Any, ...]:
    scale = call["scale"] if call["scale"] is not None else 1 / math.sqrt(call["q"].shape[3])
    options = (call.get(name) for name in ("slopes", "lengths", "documents"))
    return (call["q"], call["k"], call["v"], *options, call["alpha"], scale, call["causal"])


def ours(call: dict[str, Any]) -> dict[str, Tensor]:
    out, _ = ops.attend(*arguments(call), False)
    return {"out": out.detach(), **gradients(out, call)}


def oracle(call: dict[str, Any]) -> dict[str, Tensor]:
    out = attend(call, "reference")
    return {"out": out.detach(), **gradients(out, call)}


def plainly(call: dict[str, Any]) -> Tensor:
    """Dense attention as one writes it in PyTorch: products in the dtype of the inputs, the normaliser in float32."""
    q, k, v = call["q"], call["k"], call["v"]
    if q.dtype in (torch.float32, torch.float64):
        return attend(call, "reference")
    *_, scale, _ = arguments(call)
    shared = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(shared, 1) for tensor in (k, v))
    rules = check_rules(q, k, v, call.get("slopes"), scale, call["causal"], call.get("lengths"), call.get("documents"))
    bias = dense_scores(torch.zeros_like(q), torch.zeros_like(k), rules)  # slopes and masks
    weights = entmax((q @ k.mT * scale).float() + bias, call["alpha"])
    return weights.to(v.dtype) @ v


def plain(call: dict[str, Any]) -> dict[str, Tensor]:
    out = plainly(call)
    return {"out": out.detach(), **gradients(out, call)}


def errors_of_plain_torch(call: dict[str, Any], exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """The largest errors of `plain`.

    Above alpha 2 they hang on how the scores of one or two keys next to a threshold are rounded, so they are the
    largest of several orders in which the products of a score can be added.
    """
    width = call["q"].shape[3]
    orders = [torch.arange(width), torch.arange(width - 1, -1, -1)]
    orders += [torch.randperm(width, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    errors: dict[str, Tensor] = {}
    for order in orders if call["alpha"] > 2 else orders[:1]:
        shuffled = {key: call[key][..., order].detach().requires_grad_() for key in ("q", "k")}
        back = order.argsort()
        for key, value in plain(call | shuffled).items():
            found = value[..., back] if key in shuffled else value
            error = (found.double() - exact[key]).abs().max()
            errors[key] = torch.maximum(errors[key], error) if key in errors else error
    return errors


def assert_as_close_as_plain_torch(call: dict[str, Any], slack: float = 1.0) -> None:
    exact, found = oracle(in_float64(call)), ours(call)
    dense = errors_of_plain_torch(call, exact)
    dtype, alpha = call["q"].dtype, call["alpha"]
    rounding = slack * torch.finfo(dtype).eps * 6
    if alpha > 1.5 and alpha != 2:  # an ulp of the threshold moves a small gain, or a small weight, by its root
        rounding = 0.1 * rounding ** min(0.5, 1 / (alpha - 1))
    # What a rounding of a score's gradient, which cancels in the sum over a row, weighs in a gradient.
    *_, scale, _ = arguments(call)
    norm = scale * math.sqrt(call["v"].shape[3])
    weigh = {
        "q": norm * call["k"],
        "k": norm * call["q"],
        "slopes": torch.tensor(call["k"].shape[2] * call["q"].shape[2]),
    }
    for key, value in exact.items():
        error = (found[key].double() - value).abs().max()
        size = max(1.0, float(value.abs().max()), float(weigh.get(key, value).detach().abs().max()))
        tolerance = 3 * dense[key] + rounding * size
        assert error <= tolerance, f"{key}: {error:.3g} > {tolerance:.3g}"


@pytest.mark.parametrize(("name", "dtype"), in_every_dtype(PROBLEMS))
def test_as_close_to_the_oracle_as_plain_torch(name: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_as_close_as_plain_torch(made(PROBLEMS[name], dtype, device))


@needs_gpu
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_long_rows_are_as_close_as_plain_torch(name: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_as_close_as_plain_torch(made(LARGE[name], dtype, device))


@needs_gpu
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_alpha_4_on_long_rows_is_as_good_as_its_threshold(dtype: torch.dtype, device: torch.device) -> None:
    """A weight is the cube root of its distance to the threshold, so the threshold's last digit is worth 0.02 of it."""
    call = made(square(1500, heads=2, alpha=4.0), dtype, device)
    exact, found = oracle(in_float64(call)), ours(call)
    for key in ("out", "v"):
        error = (found[key].double() - exact[key]).abs().max()
        assert error <= 0.02 * exact[key].abs().max(), f"{key}: {error:.3g} of {exact[key].abs().max():.3g}"


@settings(max_examples=12, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes
@given(data=st.data())
def test_any_small_call_is_as_close_as_plain_torch(data: st.DataObject, device: torch.device) -> None:
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    heads, batch = kv_heads * group, data.draw(st.integers(1, 2))
    times = st.integers(1, 140 // (heads * batch))
    some_slopes = st.tuples(*[st.sampled_from((0.0, 0.05, 0.5, 3.0))] * heads)
    key_time = data.draw(times)
    problem = Problem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        query_time=data.draw(times),
        key_time=key_time,
        dim=data.draw(st.sampled_from((8, 16, 24))),
        value_dim=data.draw(st.sampled_from((8, 16, 24))),
        alpha=data.draw(st.sampled_from((1.0, 1.25, 1.5, 1.9, 2.0))),
        slopes=data.draw(st.none() | some_slopes),
        scale=data.draw(st.sampled_from((None, 1.0, -0.3, 0.0))),
        causal=data.draw(st.booleans()),
        lengths=data.draw(st.none() | st.tuples(*[st.integers(0, key_time)] * batch)),
        documents=data.draw(st.sampled_from((None, "contiguous", "interleaved"))),
        logits=data.draw(st.sampled_from((0.1, 2.0, 5.0))),
    )
    assert_as_close_as_plain_torch(made(problem, data.draw(st.sampled_from(dtypes())), device), slack=4)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 3.0])
def test_rows_that_see_nothing_are_zero_with_zero_gradients(
    alpha: float, dtype: torch.dtype, device: torch.device
) -> None:
    call = made(square(70, batch=3, slopes=(0.1,), lengths=(70, 0, 33), alpha=alpha), dtype, device)
    out, stats = ops.attend(*arguments(call), True)
    found = {"out": out, **gradients(out, call)}
    for key in ("out", "q", "k", "v"):
        assert (found[key][1] == 0).all(), key
        assert (found[key][2, :, 33:] == 0).all(), key
    assert (stats.tau[1] == torch.inf).all()
    assert all((getattr(stats, name)[1] == 0).all() for name in STAT_NAMES[1:])


@pytest.mark.parametrize(("name", "dtype"), in_every_dtype(SUMS))
def test_weights_sum_to_1(name: str, dtype: torch.dtype, device: torch.device) -> None:
    call = made(SUMS[name], dtype, device)
    call["v"] = torch.ones_like(call["v"])
    with torch.no_grad():
        out, _ = ops.attend(*arguments(call), False)
    assert float((out.double() - 1).abs().max()) <= max(1e-4, torch.finfo(dtype).eps)


def above_the_threshold(call: dict[str, Any]) -> Tensor:
    """``a * score - tau`` of every query and key, in float64; -inf where a key is hidden."""
    call = in_float64(call)
    options: dict[str, Any] = {name: call.get(name) for name in ("slopes", "scale", "causal", "lengths", "documents")}
    rules = check_rules(call["q"], call["k"], call["v"], **options)
    _, stats = attend_with_stats(call, "reference")
    with torch.no_grad():
        return (call["alpha"] - 1) * dense_scores(call["q"], call["k"], rules) - stats.tau[..., None]


@pytest.mark.parametrize(("name", "dtype"), in_every_dtype(ROWS))
def test_stats_are_those_of_the_oracle(name: str, dtype: torch.dtype, device: torch.device) -> None:
    call = made(ROWS[name], dtype, device)
    _, found = ops.attend(*arguments(call), True)
    (_, exact), (_, plain) = attend_with_stats(in_float64(call), "reference"), attend_with_stats(call, "reference")
    sees = exact.tau < torch.inf
    assert torch.equal(found.tau < torch.inf, sees)
    for key in ("tau", "entropy", "largest"):
        value, size = getattr(exact, key)[sees], getattr(exact, key)[sees].abs().max().clamp_min(1.0)
        tolerance = 3 * (getattr(plain, key)[sees] - value).abs().max() + 1e-4 * size
        error = (getattr(found, key)[sees] - value).abs().max()
        assert error <= tolerance, f"{key}: {error:.3g} > {tolerance:.3g}"
    assert ((found.block_sparsity >= 0) & (found.block_sparsity <= 1)).all()
    if call["alpha"] == 1:
        assert torch.equal(found.support, exact.support)
    else:  # up to ties at the threshold
        above = above_the_threshold(call)
        assert ((above > 1e-4).sum(-1) <= found.support).all()
        assert (found.support <= (above > -1e-4).sum(-1)).all()


def skipped_tiles(call: dict[str, Any]) -> Tensor:
    """How far above its row's threshold the highest score is in every tile that the forward leaves out."""
    kept = ops._Outputs(*ops.long_attention(*arguments(call), True, False)).live
    blocks = ops.blocks_of(call["q"], call["v"])
    above = above_the_threshold(call)
    beyond = (0, -above.shape[3] % blocks.keys, 0, -above.shape[2] % blocks.rows)
    tiles = torch.nn.functional.pad(above, beyond, value=-torch.inf)
    tiles = tiles.unflatten(3, (-1, blocks.keys)).unflatten(2, (-1, blocks.rows)).amax((3, 5)).transpose(2, 3)
    assert kept.shape == tiles.shape
    return tiles[kept == 0]


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("name", ["noise", "sparsemax", "windows", "topics", "documents", "scores_near_-1000"])
def test_a_skipped_tile_has_nothing_above_the_threshold(name: str, dtype: torch.dtype, device: torch.device) -> None:
    call = made(ROWS[name], dtype, device)
    z = float((call["alpha"] - 1) * (call["q"].detach() @ call["k"].detach().mT).abs().max())
    assert (skipped_tiles(call) <= 1e-6 * max(1.0, z)).all()


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_tiles_of_other_topics_are_skipped(alpha: float, dtype: torch.dtype, device: torch.device) -> None:
    width = 64 if dtype == torch.float32 else 128
    call = made(square(4 * width, alpha=alpha, content=topics(width)), dtype, device)
    skipped = skipped_tiles(call)
    assert (skipped <= 1e-6).all()
    assert (skipped > -torch.inf).any()
    _, stats = ops.attend(*arguments(call), True)
    assert (stats.block_sparsity > 0.5).all()


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_only_keys_that_some_row_keeps_have_a_gradient(alpha: float, dtype: torch.dtype, device: torch.device) -> None:
    call = made(square(70, heads=2, alpha=alpha, logits=30.0), dtype, device)
    best = above_the_threshold(call).amax((1, 2))  # over the rows of both heads
    moved = (ours(call)["v"][:, 0] != 0).any(-1)
    dropped = best < (-1e-4 if dtype == torch.float32 else -1e-3)
    assert dropped.any()
    assert not moved[dropped].any()
    assert moved[best > 0.05].all()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "again": lambda heads: heads,
    "transposed": lambda heads: heads.transpose(1, 2).contiguous().transpose(1, 2),
    "dims_first": lambda heads: heads.mT.contiguous().mT,
    "sliced": lambda heads: torch.nn.functional.pad(heads, (3, 2, 1, 4, 2, 0))[:, 2:, 1:-4, 3:-2],
    "every_second": lambda heads: heads.repeat_interleave(2, 2)[:, :, ::2],
}


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_bits_from_every_layout(name: str, dtype: torch.dtype, device: torch.device) -> None:
    call = made(square(70, slopes=(0.1,)), dtype, device)
    laid_out = dict(call)
    for key in ("q", "k", "v"):
        laid_out[key] = LAYOUTS[name](call[key].detach()).requires_grad_()
        assert torch.equal(laid_out[key], call[key])
    first, again = ours(call), ours(laid_out)
    assert all(torch.equal(first[key], again[key]) for key in first)


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_the_same_bits_from_expanded_inputs(alpha: float, device: torch.device) -> None:
    call = made(square(20, batch=2, heads=2, kv_heads=2, alpha=alpha), torch.float32, device)
    expanded, whole = dict(call), dict(call)
    for key, part in (("q", call["q"][:1]), ("k", call["k"][:, :1]), ("v", call["v"][:, :, :, :1])):
        expanded[key] = part.detach().expand_as(call[key]).requires_grad_()
        whole[key] = expanded[key].detach().contiguous().requires_grad_()
    first, again = ours(whole), ours(expanded)
    assert all(torch.equal(first[key], again[key]) for key in first)


OPTIONS: dict[str, Problem] = {
    "slopes": square(20, batch=2, heads=2, slopes=(0.5, 0.1)),
    "lengths": square(20, batch=2, lengths=(7, 20)),
    "documents": square(20, batch=2, documents="contiguous"),
}


@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("name", ["documents", "slopes", "lengths"])
def test_options_may_be_strided(name: str, alpha: float, device: torch.device) -> None:
    call = made(replace(OPTIONS[name], alpha=alpha), torch.float32, device)
    strided = dict(call)
    strided[name] = torch.stack([call[name].detach(), call[name].detach() + 1], -1)[..., 0]
    strided[name].requires_grad_(call[name].requires_grad)
    first, again = ours(call), ours(strided)
    assert all(torch.equal(first[key], again[key]) for key in first)


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_the_operator_is_registered_well(alpha: float, device: torch.device) -> None:
    call = made(square(40, heads=2, slopes=(0.1, 0.0), alpha=alpha), torch.float32, device)
    torch.library.opcheck(ops.long_attention, (*arguments(call), True, alpha != 1))


@needs_gpu
@pytest.mark.parametrize("times", [(100, 200, 256), (300, 333, 1024, 1500)], ids=["on_the_chip", "beyond_it"])
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_compiles_whole_and_serves_other_lengths_without_compiling_again(
    alpha: float, times: tuple[int, ...], device: torch.device
) -> None:
    torch._dynamo.reset()
    compilations = 0

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        nonlocal compilations
        compilations += 1
        return graph.forward

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, alpha=alpha, impl="triton")

    counted = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for time in times:
        call = made(square(time, heads=4, kv_heads=2, dim=32, value_dim=32, alpha=alpha), HALF, device)
        q, k, v = (call[name] for name in "qkv")
        expected, counted_out, found = layer(q, k, v), counted(q, k, v), compiled(q, k, v)
        assert torch.equal(counted_out, expected)
        assert torch.equal(found, expected)
        expected_gradients, found_gradients = gradients(expected, call), gradients(found, call)
        assert all(torch.equal(found_gradients[key], expected_gradients[key]) for key in "qkv")
    assert compilations == 1


@needs_gpu
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_more_elements_than_32_bits_count(alpha: float, device: torch.device) -> None:
    batch, heads, time, dim = 520, 64, 512, 128
    q = torch.randn(batch, heads, time, dim, device=device, dtype=HALF).requires_grad_()
    k, v = (torch.randn(batch, 8, time, dim, device=device, dtype=HALF).requires_grad_() for _ in range(2))
    assert q.numel() > 2**31
    direction = torch.randn(1, heads, time, dim, device=device, dtype=HALF)
    out = attention(q, k, v, alpha=alpha, impl="triton")
    found = (out, *torch.autograd.grad(out, (q, k, v), direction.expand_as(out)))
    last = [tensor.detach()[-1:].clone().requires_grad_() for tensor in (q, k, v)]
    alone = attention(*last, alpha=alpha, impl="triton")
    for whole, part in zip(found, (alone, *torch.autograd.grad(alone, last, direction)), strict=True):
        assert torch.equal(whole[-1:], part)


@needs_gpu
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_tokens_farther_apart_than_32_bits_count(alpha: float, device: torch.device) -> None:
    """Two heads of the projections of many, whose last token lies beyond 2^31 elements."""
    time, heads, dim = (1 << 18) + 300, 64, 128
    projections = torch.randn(1, time, heads, dim, device=device, dtype=HALF).transpose(1, 2)
    slopes = torch.tensor([0.01, 0.5], device=device)

    def results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        out = attention(*inputs, alpha=alpha, slopes=slopes, impl="triton")
        return (out, *torch.autograd.grad(out, inputs, torch.ones_like(out)))

    far = projections[:, -2:, -3000:], projections[:, -4:-2], projections[:, -6:-4]
    near = [tensor.contiguous() for tensor in far]
    assert all(torch.equal(a, b) for a, b in zip(results(*far), results(*near), strict=True))


HOSTILE: dict[str, dict[str, Any]] = {
    "noise": {"logits": 1.0},
    "topics": {"content": topics(128)},
    "topics_of_sparsemax": {"content": topics(128), "alpha": 2.0},
    "softmax": {"alpha": 1.0, "logits": 1.0},
    "slopes": {"slopes": (0.5, 0.01)},
    "scores_near_-1000": {"content": level(-1e3)},
    "one_score_of_10000": {"content": one_large},
    "queries_of_100": {"logits": 100.0},
}


def head_by_head(call: dict[str, Any]) -> dict[str, Tensor]:
    """`plain` in the memory of one head."""
    heads = call["q"].shape[1]
    direction = torch.randn(call["v"].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    parts = []
    for head in range(heads):
        one = {key: value[:, head : head + 1] if key in ("q", "k", "v") else value for key, value in call.items()}
        inputs = {key: value.detach().requires_grad_() for key, value in one.items() if key in ("q", "k", "v")}
        if "slopes" in call:
            inputs["slopes"] = call["slopes"].detach()[head : head + 1].requires_grad_()
        out = plainly(one | inputs)
        found = torch.autograd.grad(out, list(inputs.values()), direction[:, head : head + 1].to(out))
        parts.append({"out": out.detach(), **dict(zip(inputs, found, strict=True))})
    return {key: torch.cat([part[key] for part in parts], 0 if key == "slopes" else 1) for key in parts[0]}


@pytest.mark.parametrize("name", HOSTILE)
def test_half_precision_errs_at_most_twice_as_much_as_dense_torch(name: str, device: torch.device) -> None:
    time, dim = (4096, 64) if ON_GPU else (256, 16)
    call = made(square(time, heads=2, kv_heads=2, dim=dim, value_dim=dim, **HOSTILE[name]), HALF, device)
    exact, dense, found = head_by_head(in_float64(call)), head_by_head(call), ours(call)
    for key, value in exact.items():
        of_dense, of_ours = ((made[key].double() - value).square().mean().sqrt() for made in (dense, found))
        assert of_ours <= 2 * of_dense, f"{key}: {of_ours:.3g} > 2 * {of_dense:.3g}"
