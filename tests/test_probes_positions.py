"""The mathematics of the probes on positions, p_0 and the range of logits, on random instances."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.functional import entmax
from longspan.probes import Size, alibi_window, get_probe, logit_range, nope_bias, positions, rope, surface

ALPHAS = (1.2, 1.5, 1.75, 2.0, 3.0)
alphas = st.sampled_from(ALPHAS)
seeds = st.integers(0, 2**31)


def random(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(alphas, st.lists(st.floats(-6, 6), min_size=1, max_size=6))
def test_the_first_weight_is_zero_outside_its_ball_and_one_below_its_corner(alpha: float, others: list[float]) -> None:
    r = 1 / (alpha - 1)
    norm = sum(max(z, 0.0) ** r for z in others) ** (1 / r)
    assume(abs(norm / r - 1) > 1e-6)
    assume(abs(max(others) + r) > 1e-6)
    weights = entmax(torch.tensor([0.0, *others], dtype=torch.float64), alpha)
    # A weight of the order of 1e-6 to the power r, with r up to 5, is still above what rounding hides.
    assert (weights[0] == 0) == (norm > r)
    assert bool((weights[1:] == 0).all()) == (max(others) < -r)


def test_the_boundary_of_sparsemax_is_a_line_and_of_entmax_15_a_circle() -> None:
    for angle in (0.1, 0.7, 1.3):
        direction = (math.cos(angle), math.sin(angle))
        assert surface.zero_radius(direction, 2.0) * sum(direction) == pytest.approx(1)
        assert surface.zero_radius(direction, 1.5) == pytest.approx(2)
    assert surface.one_radius((-3.0, -0.5), 1.5) == pytest.approx(4)


def test_only_top_k_jumps() -> None:
    starts = torch.tensor([0.01, 1.0], dtype=torch.float64)
    assert surface.jump(surface.weights_of(None), starts) == pytest.approx(1 / (1 + math.exp(0.01)))
    for alpha in (1.0, 1.5, 2.0, 4.0):
        assert surface.jump(surface.weights_of(alpha), starts) < 1e-6


@given(alphas, seeds, st.floats(0, 4), st.floats(0.05, 3))
@settings(deadline=None)
def test_nothing_is_seen_beyond_the_alibi_window(alpha: float, seed: int, spread: float, slope: float) -> None:
    n = alibi_window.paper_bound(spread, slope, alpha) + 3
    contents = spread * (random(seed, 8, n) ** random(seed + 1, 8, 1).mul(8))  # some rows mostly low, some mostly high
    farthest = alibi_window.farthest(contents, slope, alpha)
    sharp, simple = (bound(spread, slope, alpha) for bound in (alibi_window.sharp_bound, alibi_window.simple_bound))
    assert farthest <= sharp <= simple < alibi_window.paper_bound(spread, slope, alpha)


@given(alphas, st.floats(0, 4), st.floats(0.05, 3))
@settings(deadline=None)
def test_the_sharp_alibi_bound_is_attained(alpha: float, spread: float, slope: float) -> None:
    sharp = alibi_window.sharp_bound(spread, slope, alpha)
    contents = torch.zeros(1, sharp + 1, dtype=torch.float64)
    contents[0, sharp] = spread
    assert alibi_window.farthest(contents, slope, alpha) == sharp or spread < 1e-6
    assert alibi_window.adversarial(spread, slope, alpha) == sharp


def test_the_alibi_proof_with_its_sign_kept_is_wrong() -> None:
    # Sparsemax of [0, -0.6, -1.2] is [0.8, 0.2, 0]: distance 1 has weight, though floor(1/0.6 - 1) = 0.
    assert alibi_window.farthest(torch.zeros(1, 3, dtype=torch.float64), 0.6, 2.0) == 1
    assert alibi_window.kept_sign_bound(0.0, 0.6, 2.0) == 0
    assert alibi_window.sharp_bound(0.0, 0.6, 2.0) == alibi_window.simple_bound(0.0, 0.6, 2.0) == 1
    assert alibi_window.paper_bound(0.0, 0.6, 2.0) == 2


def test_the_alibi_window_of_gentle_slopes() -> None:
    for alpha in (1.5, 2.0):
        r, slope = 1 / (alpha - 1), 2.0**-14
        slack = ((r + 1) * r**r * slope) ** (1 / (r + 1))
        assert alibi_window.sharp_bound(0.0, slope, alpha) == pytest.approx(slack / slope, rel=0.01)


@pytest.mark.parametrize(
    ("inverse", "window", "reach"), [(1, 1, 2), (2, 3, 5), (4, 5, 11), (8, 8, 23), (32, 22, 95), (256, 91, 766)]
)
def test_how_far_slopes_let_entmax_and_softmax_see(inverse: int, window: int, reach: int) -> None:
    """The table of docs/probes.md."""
    scores = -torch.arange(4000, dtype=torch.float64) / inverse
    assert int((entmax(scores, 1.5) > 0).sum()) - 1 == alibi_window.sharp_bound(0.0, 1 / inverse, 1.5) == window
    assert int((entmax(scores, 1.0).cumsum(0) < 0.95).sum()) == reach


@given(alphas, seeds)
@settings(deadline=None)
def test_no_aligned_rope_head_sees_beyond_its_reach(alpha: float, seed: int) -> None:
    rates = rope.frequencies()
    amplitudes = rope.random_head(torch.Generator().manual_seed(seed))
    inside = rope.domain(amplitudes, rates)
    z = rope.scores(amplitudes, rates, inside + 1)
    farthest = rope.windows(z, alpha)[-1][1]
    assert farthest < rope.FACTOR * rope.reach(z, amplitudes, rates, alpha) + 1e-6


def test_the_small_angle_distance_is_not_a_bound() -> None:
    # One chunk, g = 1, A = 2: sparsemax of [2, 2 cos 1] is [0.96, 0.04], and d_max = floor(sqrt(0.96)) = 0.
    amplitude, rate = torch.tensor([2.0]).double(), torch.tensor([1.0]).double()
    z = rope.scores(amplitude, rate, 2)
    assert rope.domain(amplitude, rate) == 1
    reach = rope.reach(z, amplitude, rate, 2.0)
    assert reach == pytest.approx(math.sqrt((3 - 2 * math.cos(1)) / 2))
    assert reach < 1
    assert entmax(z, 2.0)[1] == pytest.approx(math.cos(1) - 0.5)


def test_rope_starts_with_a_domain_of_two_tokens() -> None:
    rates = rope.frequencies()
    assert rates.max() == 1
    assert rope.domain(torch.ones_like(rates), rates) == 1


def test_no_single_chunk_has_to_reach_the_threshold() -> None:
    amplitudes = torch.ones(4, dtype=torch.float64)
    z = rope.scores(amplitudes, torch.tensor([1.0, 0.9, 0.8, 0.7]).double(), 3)
    assert rope.cut(z, 2.0) > amplitudes.max()


@given(alphas, st.floats(0.05, 1.5), st.floats(0.1, 8))
@settings(deadline=None)
def test_the_windows_of_one_chunk(alpha: float, rate: float, amplitude: float) -> None:
    z = rope.scores(torch.tensor([amplitude]).double(), torch.tensor([rate]).double(), 100)
    share = rope.cut(z, alpha) / amplitude
    assume(share > -1)
    assume(((z / amplitude - share).abs() > 1e-9).all())
    # Windows that touch are one run of distances.
    seen = {d for first, last in rope.predicted_windows(rate, share, 100) for d in range(first, last + 1)}
    assert seen == {d for first, last in rope.windows(z, alpha) for d in range(first, last + 1)}


@given(alphas, seeds, st.integers(2, 7), st.floats(0.1, 4))
@settings(deadline=None)
def test_depth_leads_to_the_first_token_at_least_as_fast_as_the_coins(
    alpha: float, seed: int, token: int, scale: float
) -> None:
    hidden = torch.ones(token, token).triu(1) > 0
    product, etas = torch.eye(token, dtype=torch.float64), []
    for layer in range(12):
        p = entmax((scale * random(seed + layer, token, token)).masked_fill(hidden, -math.inf), alpha)
        product = p @ product
        etas.append(nope_bias.past_weight(p, token))
        assert 1 - product[-1, 0].item() <= nope_bias.bound(etas, token) + 1e-12


def test_the_coins_by_hand() -> None:
    assert nope_bias.bound([0.25, 0.5], 2) == pytest.approx(0.75 * 0.5)
    assert nope_bias.bound([0.25, 0.5], 3) == pytest.approx(1 - 0.25 * 0.5)
    assert nope_bias.bound([1.0] * 3, 4) == 0


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_a_path_in_every_layer_does_not_lead_to_the_first_token(alpha: float) -> None:
    for name in ("fork", "relay", "fading"):
        token = nope_bias.EXAMPLES[name].token
        product = torch.eye(4, dtype=torch.float64)
        for p in nope_bias.layers_of(name, 41, alpha):
            reaches = torch.matrix_power((p > 0).double(), 4)
            assert reaches[token - 1, 0] > 0
            product = p @ product
        assert product[token - 1, 0] < 0.72


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_the_fork_is_a_network_that_stays_as_it_is(alpha: float) -> None:
    # Tokens e1, e2 and (e1 + e2)/2, queries and keys sqrt(2) x, values x: every layer is the same.
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    hidden = torch.ones(3, 3).triu(1) > 0
    p = entmax((2 * x @ x.T).masked_fill(hidden, -math.inf), alpha)
    torch.testing.assert_close(p @ x, x)
    expected = next(nope_bias.layers_of("fork", 1, alpha))[:3, :3]
    torch.testing.assert_close(p, expected)
    assert torch.matrix_power(p, 60)[2, 0] == pytest.approx(0.5)


@given(alphas, seeds)
def test_logits_with_given_weights(alpha: float, seed: int) -> None:
    weights = random(seed, 5) * (random(seed + 1, 5) > 0.4)
    assume(weights.sum() > 0)
    weights = weights / weights.sum()
    torch.testing.assert_close(entmax(nope_bias.logits_of(weights, alpha), alpha), weights, rtol=0, atol=1e-9)


def test_the_range_of_few_gaussians_by_hand() -> None:
    # E|x - y| = 2/sqrt(pi); three have 3/sqrt(pi).
    assert logit_range.exact(2, 1.0) == pytest.approx(2 / math.sqrt(math.pi))
    assert logit_range.exact(3, 2.0) == pytest.approx(6 / math.sqrt(math.pi))
    for n in (2, 100, 10**6, 10**9):
        assert logit_range.exact(n, 1.0) < logit_range.law(n, 1.0)


def test_the_range_in_blocks_is_that_of_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = logit_range.measured_ranges(1024, 3)
    monkeypatch.setattr(logit_range, "BLOCK", 1024)
    one_by_one = logit_range.measured_ranges(1024, 3)
    monkeypatch.setattr(logit_range, "BLOCK", 64)
    in_blocks = logit_range.measured_ranges(1024, 3)
    torch.testing.assert_close(whole, one_by_one)
    torch.testing.assert_close(whole, in_blocks)


def test_even_attention_has_its_centroid_in_the_middle() -> None:
    n = positions.LENGTH
    even = torch.ones(n, n, dtype=torch.float64).tril()
    even = even / even.sum(-1, keepdim=True)
    torch.testing.assert_close(positions.centroids(even), (torch.arange(1, n + 1).double() + 1) / 2)


def test_simulated_logits_are_the_appendix_s() -> None:
    z = positions.contents(1, 400)
    assert (z[:, 3, 4:] == -math.inf).all()
    assert z[:, 127, 127].mean() == pytest.approx(2, abs=0.6)
    assert z[:, 127, :].mean() == pytest.approx(2 * (1 - 0.25), abs=0.1)
    expected = z[:, 50, 40] - 10 * positions.slope(2, 4)
    torch.testing.assert_close(positions.encoded(z, "alibi", 2, 4)[:, 50, 40], expected)


SPOILED = {
    "surface": lambda row: {**row, "jump": 0.5},
    "logit-range": lambda row: {**row, "range": row["range"] * 1.2},
    "alibi-window": lambda row: {**row, "uniform": row["paper"] + 1},
    "rope": lambda row: {**row, "farthest": 10**6},
    "nope-bias": lambda row: {**row, "least": [0.0] * len(row["least"])},
    "positions": lambda row: {**row, "least": 0.0},
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_verdict_can_fail(name: str) -> None:
    size: Size = "small"
    probe = get_probe(name)
    rows = list(probe.measure(size, lambda done, total, note: None))
    assert probe.verdict(rows)[0]
    assert not probe.verdict([SPOILED[name](row) for row in rows])[0]
