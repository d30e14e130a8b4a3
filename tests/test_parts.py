"""Every method with every position, and every part in its registry: what any of them must satisfy."""

import math
from collections.abc import Callable
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

import longspan
from longspan.nn import (
    METHODS,
    NAPE,
    NORMALIZERS,
    POSITIONS,
    SCALERS,
    Adaptive,
    AdaptiveTemperature,
    ALiBi,
    Attention,
    Entmax,
    KVCache,
    LlamaScaling,
    NoPE,
    Normalizer,
    NoScale,
    RoPE,
    Scalable,
    Scaler,
    Softmax,
    SSMax,
    StickBreaking,
    TopK,
    build_attention,
    exponential_slopes,
    linear_slopes,
)
from longspan.nn.attention import joint_projection
from longspan.nn.scalers import log_length, softplus

DIM, HEADS, TIME = 24, 4, 37

CELLS = [pytest.param(method, position, id=f"{method}-{position}") for method, position in product(METHODS, POSITIONS)]

# One or more instances of every class in the registry; the test below says if a new class is missing.
NORMALIZER_CASES: dict[str, Callable[[], Normalizer]] = {
    "softmax": Softmax,
    "softmax-temperature": lambda: Softmax(0.3),
    "entmax": Entmax,
    "entmax-1": lambda: Entmax(1.0),
    "entmax-64": lambda: Entmax(64.0),
    "entmax-learned": lambda: Entmax("learned", HEADS),
    "topk": lambda: TopK(k=5),
    "topk-fraction": lambda: TopK(fraction=0.5),
    "adaptive_temperature": AdaptiveTemperature,
    "stick_breaking": StickBreaking,
}
SCALER_CASES: dict[str, Callable[[], Scaler]] = {
    "none": NoScale,
    "ssmax": lambda: SSMax(DIM, HEADS),
    "ssmax-delta": lambda: SSMax(DIM, HEADS, delta=1.0),
    "scalable": lambda: Scalable(DIM, HEADS),
    "adaptive": lambda: Adaptive(DIM, HEADS, initial_beta=None),
    "adaptive-safe": lambda: Adaptive(DIM, HEADS),
    "adaptive-fixed": lambda: Adaptive(DIM, HEADS, gamma=3.0),
}


def layer(method: str, position: str = "nape", **options: object) -> Attention:
    torch.manual_seed(0)
    built = build_attention(method, DIM, HEADS, position=position, **options).double()  # type: ignore[arg-type]
    with torch.no_grad():  # away from the symmetric start, so that every part matters
        for parameter in built.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        built.query.weight.mul_(3)
    return built


def inputs(batch: int = 2, time: int = TIME) -> Tensor:
    return torch.randn(batch, time, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_every_registered_part_is_covered() -> None:
    assert {type(make()) for make in NORMALIZER_CASES.values()} == set(NORMALIZERS.values())
    assert {type(make()) for make in SCALER_CASES.values()} == set(SCALERS.values())


def test_methods_are_listed_with_a_line_each() -> None:
    assert " ".join(longspan.methods()) == (
        "softmax ssmax assmax entmax sentmax asentmax topk adaptive_temperature stick_breaking"
    )
    assert all(line and "\n" not in line for line in longspan.methods().values())


@pytest.mark.parametrize(("method", "position"), CELLS)
def test_a_later_token_never_changes_an_earlier_output(method: str, position: str) -> None:
    attention, x = layer(method, position), inputs()
    changed = x.clone()
    changed[:, 20:] += 3 * torch.randn_like(changed[:, 20:])
    before, after = attention(x), attention(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=1e-12)
    assert not torch.allclose(before[:, 21:], after[:, 21:])


@pytest.mark.parametrize(("method", "position"), CELLS)
def test_cached_equals_full(method: str, position: str) -> None:
    attention, x = layer(method, position), inputs()
    cache = KVCache()
    with torch.no_grad():
        full = attention(x)
        pieces = [attention(part, cache=cache) for part in x.split([10, 1, 1, 3, 1, TIME - 16], dim=1)]
    assert len(cache) == TIME
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("method", "position"), CELLS)
def test_padding_never_leaks(method: str, position: str) -> None:
    attention, x = layer(method, position), inputs()
    lengths = torch.tensor([TIME, 23])
    out = attention(x, lengths=lengths)
    torch.testing.assert_close(out[1, :23], attention(x[1:, :23])[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(out[0], attention(x[:1])[0], rtol=0, atol=1e-10)
    assert (out[1, 23:] == 0).all()
    noisy = x.clone()
    noisy[1, 23:] = 1e3
    torch.testing.assert_close(attention(noisy, lengths=lengths), out, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("method", "position"), CELLS)
def test_packed_documents_equal_documents_alone(method: str, position: str) -> None:
    attention, x = layer(method, position), inputs(batch=1)
    bounds = (0, 11, 12, 30, TIME)
    documents = torch.cat([torch.full((1, end - start), start) for start, end in pairwise(bounds)], 1)
    alone = [attention(x[:, start:end]) for start, end in pairwise(bounds)]
    torch.testing.assert_close(attention(x, documents=documents), torch.cat(alone, dim=1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_left_padding_is_a_document_of_its_own(method: str) -> None:
    attention, x = layer(method), inputs(batch=1)
    padded = torch.cat([torch.full((1, 5, DIM), 7.0, dtype=torch.float64), x], dim=1)
    documents = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones(1, TIME, dtype=torch.long)], dim=1)
    cache = KVCache()
    with torch.no_grad():
        prefill = attention(padded[:, :20], documents=documents[:, :20], cache=cache)
        decoded = [attention(token, cache=cache) for token in padded[:, 20:].split(1, dim=1)]  # ids carry on
        torch.testing.assert_close(torch.cat([prefill, *decoded], dim=1)[:, 5:], attention(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("method", "position"), CELLS)
def test_gradients_reach_every_parameter(method: str, position: str) -> None:
    attention = layer(method, position)
    (attention(inputs()) ** 2).sum().backward()
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert (parameter.grad != 0).any(), name


@pytest.mark.parametrize(("method", "position"), CELLS)
def test_a_new_layer_trains_from_its_own_start(method: str, position: str) -> None:
    torch.manual_seed(0)
    attention = build_attention(method, DIM, HEADS, position=position)
    out = attention(inputs().float())
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in attention.parameters())


@pytest.mark.parametrize("case", NORMALIZER_CASES)
def test_a_normalizer_gives_weights(case: str) -> None:
    normalizer = NORMALIZER_CASES[case]().double()
    torch.manual_seed(0)
    scores = 3 * torch.randn(2, HEADS, 9, 13, dtype=torch.float64)
    scores[..., 10:] = -math.inf
    scores[0, 0, 0] = -math.inf
    scores.requires_grad_()
    weights = normalizer(scores)
    (weights**2).sum().backward()
    assert (weights >= 0).all()
    assert (weights[..., 10:] == 0).all()
    assert (weights[0, 0, 0] == 0).all()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    assert (scores.grad[..., 10:] == 0).all()
    total = weights.sum(-1)
    if normalizer.ordered:
        assert (total <= 1 + 1e-12).all()
    else:
        torch.testing.assert_close(total.flatten()[1:], torch.ones_like(total.flatten()[1:]))


@pytest.mark.parametrize("case", [name for name, make in NORMALIZER_CASES.items() if make().entmax_form()])
def test_the_entmax_form_of_a_normalizer_is_the_same_map(case: str) -> None:
    torch.manual_seed(0)
    normalizer = NORMALIZER_CASES[case]().double()
    form = normalizer.entmax_form()
    assert form is not None
    q, k, v = (torch.randn(2, HEADS, 11, 8, dtype=torch.float64) for _ in range(3))
    slopes = torch.linspace(0, 1, HEADS, dtype=torch.float64)
    distance = (torch.arange(11)[:, None] - torch.arange(11)).abs()
    scores = 0.7 * q @ k.transpose(-1, -2) - slopes[:, None, None] * distance
    scores = scores.masked_fill(torch.ones(11, 11, dtype=torch.bool).triu(1), -math.inf)
    out = longspan.attention(q, k, v, alpha=form.alpha, scale=0.7 / form.temperature, slopes=slopes / form.temperature)
    torch.testing.assert_close(out, normalizer(scores) @ v)


@pytest.mark.parametrize("case", SCALER_CASES)
def test_a_scaler_gives_a_finite_scale_per_head_and_query(case: str) -> None:
    torch.manual_seed(0)
    scaler = SCALER_CASES[case]()
    n = torch.tensor([[1, 2, 3], [1, 1000, 1 << 20]])
    scale = scaler(torch.randn(2, 3, DIM), n)
    if scale is None:
        assert isinstance(scaler, NoScale)
        return
    assert scale.shape == (2, HEADS, 3)
    assert scale.isfinite().all()
    assert (scale > 0).all()


def test_the_scales_are_the_papers_formulas() -> None:
    n = torch.tensor([[4, 9]])
    x = torch.randn(1, 2, DIM)
    log_n = (n + 1).float().log()
    torch.testing.assert_close(log_length(n, x), log_n)

    ssmax = SSMax(DIM, 2)
    torch.testing.assert_close(ssmax(x, n)[0, 1], ssmax.s[1] * log_n[0])
    scalable = Scalable(DIM, 2)
    torch.testing.assert_close(scalable(x, n)[0, 1], 1 + scalable.beta[1] * log_n[0] ** scalable.gamma[1])
    adaptive = Adaptive(DIM, 2, delta=0.5, gamma_range=3.0, initial_beta=None)
    assert isinstance(adaptive.gamma, torch.nn.Linear)
    beta = torch.nn.functional.softplus(x @ adaptive.beta.weight.T + adaptive.beta.bias)
    gamma = 3 * torch.tanh(x @ adaptive.gamma.weight.T + adaptive.gamma.bias)
    torch.testing.assert_close(adaptive(x, n).transpose(1, 2), 0.5 + beta * log_n[..., None] ** gamma)


def test_the_safe_start_of_the_adaptive_scale_is_near_one() -> None:
    scale = Adaptive(DIM, HEADS)(100 * torch.randn(1, 3, DIM), torch.tensor([[1, 100, 1 << 20]]))
    torch.testing.assert_close(scale, torch.full_like(scale, 1.05))


def test_only_the_content_heads_of_nape_are_scaled() -> None:
    x = inputs(batch=1)
    plain, scaled = layer("entmax", "nape"), layer("entmax", "nape", scaler=SSMax(DIM, HEADS))
    scaled.load_state_dict(plain.state_dict(), strict=False)
    for built in (plain, scaled):
        built.output = torch.nn.Identity()  # type: ignore[assignment]
    before, after = (built(x).unflatten(-1, (HEADS, -1)) for built in (plain, scaled))
    torch.testing.assert_close(before[:, :, : HEADS // 2], after[:, :, : HEADS // 2], rtol=0, atol=1e-12)
    assert not torch.allclose(before[:, :, HEADS // 2 :], after[:, :, HEADS // 2 :])


def test_slopes() -> None:
    torch.testing.assert_close(linear_slopes(4), torch.tensor([1, 1 / 2, 1 / 3, 1 / 4]))
    torch.testing.assert_close(exponential_slopes(8), 2.0 ** -torch.arange(1, 9))
    torch.testing.assert_close(exponential_slopes(3), torch.tensor([2.0**-4, 2.0**-8, 2.0**-2]))
    assert ALiBi(4, 8).slopes is not None
    assert NoPE(4, 8).slopes is None
    nape = NAPE(6, 8, exponential_slopes)
    torch.testing.assert_close(nape.slopes, torch.cat([exponential_slopes(3), torch.zeros(3)]))
    assert nape.scaled.tolist() == [False] * 3 + [True] * 3
    assert ALiBi(4, 8).scaled.all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", POSITIONS)
def test_a_model_in_half_precision_keeps_its_positions(name: str, dtype: torch.dtype) -> None:
    """A frequency of 8 bits turns by another angle after a few hundred tokens, and 1/3 is no slope of that dtype."""
    exact, finer = POSITIONS[name](6, 16), exponential_slopes(16)
    torch.set_default_dtype(dtype)  # as transformers does while it builds a model of that dtype
    try:
        built = POSITIONS[name](6, 16)
        assert torch.equal(exponential_slopes(16), finer)
    finally:
        torch.set_default_dtype(torch.float32)
    for position in (built, torch.nn.Sequential(POSITIONS[name](6, 16)).to(dtype)[0]):
        for buffer, value in position.named_buffers():
            torch.testing.assert_close(value, exact.get_buffer(buffer), rtol=0, atol=0)


def test_rope_depends_on_distance_alone_and_keeps_norms() -> None:
    rope = RoPE(1, 16)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def product_at(i: int, j: int) -> float:
        return float((rope.rotate(q, torch.tensor([i])) * rope.rotate(k, torch.tensor([j]))).sum())

    assert product_at(7, 3) == pytest.approx(product_at(1_000_007, 1_000_003), abs=1e-9)
    assert product_at(7, 3) != pytest.approx(product_at(8, 3), abs=1e-3)
    torch.testing.assert_close(rope.rotate(q, torch.tensor([12345])).norm(), q.norm())


def test_llama_scaling_slows_slow_turns_only() -> None:
    length, factor = 64, 16.0
    plain, scaled = RoPE(1, 64), RoPE(1, 64, scaling=LlamaScaling(factor, length))
    turns = length * plain.frequencies / (2 * math.pi)
    ratio = scaled.frequencies / plain.frequencies
    torch.testing.assert_close(ratio[turns > 4], torch.ones_like(ratio[turns > 4]))
    torch.testing.assert_close(ratio[turns < 1], torch.full_like(ratio[turns < 1], 1 / factor))
    between = ratio[(turns > 1) & (turns < 4)]
    assert ((between > 1 / factor) & (between < 1)).all()
    assert len(between)
    assert (scaled.rebased(500_000.0).frequencies[1:] < scaled.frequencies[1:]).all()


def test_stick_breaking_is_the_product_of_its_definition() -> None:
    scores = torch.randn(5, dtype=torch.float64)
    share = scores.sigmoid()
    expected = torch.zeros(5, dtype=torch.float64)
    left = 1.0
    for j in range(3, -1, -1):  # the last token is the current one
        expected[j] = share[j] * left
        left *= 1 - float(share[j])
    torch.testing.assert_close(StickBreaking()(scores.view(1, 1, 1, 5)).flatten(), expected)


def test_topk_keeps_k_or_a_fraction_of_what_a_row_sees() -> None:
    scores = torch.randn(1, 1, 6, 10).masked_fill(torch.arange(10) > torch.arange(4, 10)[:, None], -math.inf)
    assert ((TopK(k=3)(scores) > 0).sum(-1) == 3).all()
    assert (TopK(fraction=0.5)(scores) > 0).sum(-1).flatten().tolist() == [2, 3, 3, 4, 4, 5]
    tied = torch.tensor([2.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    first, others = math.e / (math.e + 2), 2 / (math.e + 2) / 3  # two places for the three that tie
    wanted = torch.tensor([first, others, 0, others, others, 0])
    for normalizer in (TopK(k=3), TopK(fraction=0.5)):
        torch.testing.assert_close(normalizer(tied.view(1, 1, 1, 6)).flatten(), wanted)


@pytest.mark.parametrize("normalizer", [TopK(k=2), TopK(fraction=0.4)], ids=["k", "fraction"])
def test_a_score_that_is_nan_makes_its_own_row_nan(normalizer: TopK) -> None:
    scores = torch.tensor([[3.0, math.nan, 2.0, 1.0, -math.inf], [3.0, 1.0, 2.0, 0.0, -math.inf]])
    weights = normalizer(scores[None, None])[0, 0]
    assert weights[0].isnan().all()
    assert weights[1].isfinite().all()


@pytest.mark.parametrize(("fraction", "seen", "kept"), [(0.53, 100, 53), (0.29, 100, 29), (0.21, 300, 63), (0.3, 9, 2)])
def test_a_fraction_is_rounded_down_from_the_number_it_stands_for(fraction: float, seen: int, kept: int) -> None:
    """0.29 is a hair less than 29 / 100."""
    weights = TopK(fraction=fraction)(torch.arange(float(seen))[None, None, None] / seen)
    assert int((weights > 0).sum()) == kept


def test_adaptive_temperature_follows_the_original_polynomial() -> None:
    # Entropies of 1.3, 3.2, 0.003, and of 0.7, where the polynomial is below 1.
    few, many = torch.tensor([0.5, 1.0, -0.2, 0.1]), torch.linspace(-2, 2, 40)
    for scores in (few, many, torch.tensor([9.0, 0.0, 0.0, 0.0]), torch.tensor([2.5, 0.0, 0.0, 0.0])):
        p = scores.softmax(-1)
        h = float(torch.special.entr(p).sum())
        beta = max(1.0, -0.037 * h**4 + 0.481 * h**3 - 2.3 * h**2 + 4.917 * h - 1.791) if h > 0.5 else 1.0
        expected = (beta * scores).softmax(-1)
        torch.testing.assert_close(AdaptiveTemperature()(scores.view(1, 1, 1, -1)).flatten(), expected)


def test_grouped_heads_and_norms_compose() -> None:
    attention = layer("asentmax", "rope", num_kv_heads=2, head_dim=10, qk_norm=True)
    assert attention(inputs()).shape == (2, TIME, DIM)
    assert attention.key.weight.shape == (20, DIM)


def test_half_precision_layers_answer_in_kind() -> None:
    attention = layer("asentmax").to(torch.bfloat16)
    assert attention(inputs().bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_attention("hardmax", DIM, HEADS), "unknown method 'hardmax'; there are softmax"),
        (lambda: build_attention("entmax", DIM, HEADS, position="sinus"), "unknown position 'sinus'; there are nope"),
        (lambda: build_attention("entmax", DIM, 5), "does not divide dim"),
        (lambda: build_attention("entmax", DIM, HEADS, num_kv_heads=3), "must divide num_heads"),
        (lambda: build_attention("stick_breaking", DIM, HEADS, causal=False), "needs causal attention"),
        (lambda: build_attention("entmax", DIM, 1, position="nape"), "at least 2 heads"),
        (lambda: build_attention("entmax", 20, HEADS, position="rope"), "even head_dim"),
        (lambda: Entmax(0.9), "between 1 and 64"),
        (lambda: Entmax(65.0), "between 1 and 64"),
        (lambda: Softmax(0.0), "must be positive"),
        (lambda: TopK(), "either k or fraction"),
        (lambda: TopK(k=0), "at least 1"),
        (lambda: Adaptive(DIM, HEADS, initial_beta=0.0), "must be positive"),
        (lambda: layer("entmax")(inputs(), cache=KVCache(), lengths=torch.tensor([3, 4])), "pad on the left"),
        (lambda: build_attention("topk", DIM, HEADS, impl="flash"), "impl must be 'auto' or one of reference"),
        (lambda: layer("topk", impl="chunked")(inputs()), "TopK is no entmax"),
    ],
)
def test_bad_arguments_say_what_is_wrong(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_cache_refuses_another_batch_and_ids_that_come_late() -> None:
    attention, cache = layer("entmax"), KVCache()
    attention(inputs(), cache=cache)
    with pytest.raises(ValueError, match="a batch of 2"):
        attention(inputs(batch=3), cache=cache)
    with pytest.raises(ValueError, match="no document ids"):
        attention(inputs(), cache=cache, documents=torch.zeros(2, TIME, dtype=torch.long))


def test_a_joint_projection_is_that_of_every_layer() -> None:
    attention = layer("asentmax", "nope", num_kv_heads=2)
    beta, gamma = attention.scaler.projections()
    torch.nn.init.normal_(beta.bias)
    torch.nn.init.normal_(gamma.bias)
    x = torch.randn(2, 5, attention.query.in_features, dtype=attention.query.weight.dtype)
    every = (attention.query, attention.key, attention.value, *attention.scaler.projections())
    assert len(every) == 5
    for layers in (every, (beta, attention.query, gamma, attention.key)):
        for projected in (joint_projection, torch.compile(joint_projection, fullgraph=True, backend="eager")):
            for joint, part in zip(projected(layers, x), layers, strict=True):
                torch.testing.assert_close(joint, part(x))


def test_a_compiler_and_autograd_agree_on_the_gradients_of_a_scale() -> None:
    """Its transposed gradients have strides that torch's own softplus misstates to a compiler."""
    torch.manual_seed(0)
    scaler = Adaptive(8, 3, initial_beta=None)
    x, n = torch.randn(2, 5, 8), torch.arange(1, 6).expand(2, 5)
    queries = torch.randn(2, 5, 3, 4).transpose(1, 2)

    def gradients(run: Callable[..., Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(run(x, n), list(scaler.parameters())))

    def total(x: Tensor, n: Tensor) -> Tensor:
        return (queries * scaler(x, n)[..., None]).sum()

    for mine, theirs in zip(gradients(torch.compile(total, backend="aot_eager")), gradients(total), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_softplus_is_torchs() -> None:
    x = torch.linspace(-120, 120, 1001, dtype=torch.float64, requires_grad=True)
    ours, theirs = softplus(x), torch.nn.functional.softplus(x, threshold=1000)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(value.sum(), x)[0] for value in (ours, theirs)))


def test_the_scale_of_sentmax_starts_where_the_released_code_starts_it() -> None:
    torch.manual_seed(0)
    scaler = Scalable(DIM, 10_000)
    assert [round(float(end), 2) for end in scaler.beta.detach().aminmax()] == [0.1, 1.0]
    assert float(scaler.gamma.detach().std()) == pytest.approx(0.1, rel=0.05)
