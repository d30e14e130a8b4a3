"""The stages of attention over long rows: what the survey guesses, where the solver ends, and what is left out."""

from typing import Any

import pytest
import torch
from long_problems import PROBLEMS
from test_kernels import dtypes
from test_long_kernels import arguments, made, ops
from torch import Tensor

from longspan import attention
from longspan.functional.entmax import entmax, threshold

HALVES = [dtype for dtype in dtypes() if dtype.itemsize == 2]


def outputs(q: Tensor, k: Tensor, v: Tensor, scale: float, grad: bool = True) -> Any:
    return ops._Outputs(*ops.long_attention(q, k, v, None, None, None, 1.5, scale, True, grad, False))


def test_a_height_in_float32_is_right_to_its_last_digit(device: torch.device) -> None:
    """Of scores that float32 holds exactly, alpha 1.5: a height that is off moves all gains of its row alike."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randint(-4, 5, (1, 2, 200, 16), generator=generator).float().to(device) for _ in range(3))
    z = (q.double() @ k.double().mT) * 2.0**-6
    z = z.masked_fill(torch.ones_like(z).triu(1) > 0, -torch.inf)
    exact = z.amax(-1) - threshold(2 * z, 1.5).tau[..., 0]
    assert (outputs(q, k, v, 2.0**-5).height - exact).abs().max() < 1e-7


@pytest.mark.parametrize(("topics", "size"), [(0, 1.0), (4, 1.0), (0, 0.3), (0, 0.1), (0, 0.01)])
def test_the_survey_guesses_the_height(
    topics: int, size: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On noise, on structure and on rows that are nearly flat the sum of the weights at the guess is near 1, where the
    solver would take one step."""
    hints = []

    class Spy:
        def __init__(self, kernel: Any):
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            def launch(*given: Any, **options: Any) -> None:
                self.kernel[grid](*given, **options)
                hints.append((given[2].clone(), given[5].clone()))  # maximum, hint

            return launch

    monkeypatch.setattr(ops, "survey_kernel", Spy(ops.survey_kernel))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 512, 64, generator=generator) for _ in range(3))
    q *= size
    if topics:
        of_token = torch.randint(topics, (4,), generator=generator).repeat_interleave(128)
        q, k = (part + 9 * torch.eye(64)[of_token] for part in (q, k))
    q, k, v = (part.to(device, HALVES[-1]) for part in (q, k, v))
    outputs(q, k, v, 0.125)
    maximum, hint = hints[0]
    z = (q.double() @ k.double().mT) * 0.0625
    u = (z.masked_fill(torch.ones_like(z).triu(1) > 0, -torch.inf) - (maximum - hint)[..., None]).clamp_min(0)
    mass = u.square().sum(-1)
    assert (mass.sqrt() - 1).abs().max() < 0.25
    assert (mass - 1).square().mean().sqrt() < 0.1


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", [name for name, problem in PROBLEMS.items() if problem.alpha != 1])
def test_without_gradients_the_output_is_the_same_but_for_rounding(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Then no mean is made, and weights are divided by their sum instead of one more step."""
    call = made(PROBLEMS[name], dtype, device)
    with_gradients = ops.attend(*arguments(call), False)[0]
    with torch.no_grad():
        without = ops.attend(*arguments(call), False)[0]
    assert with_gradients.requires_grad
    assert not without.requires_grad
    size = call["v"].abs().max()
    assert (with_gradients - without).abs().max() <= 2 * torch.finfo(dtype).eps * size


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("alpha", [1.25, 1.5, 1.75])
@pytest.mark.parametrize(("count", "gap"), [(300, 0.9), (1000, 0.75), (1000, 0.95), (3000, 0.95), (3000, 0.98)])
def test_a_peak_over_a_plateau(
    count: int, gap: float, alpha: float, grad: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key `gap` above very many that tie, in units of the threshold: a guess may fall on the wrong side of them."""
    if device.type == "cpu":  # the interpreter has no bfloat16, but float16 can be solved as coarsely
        real, slack = ops._precision, ops._slack(torch.bfloat16)
        monkeypatch.setattr(ops, "_precision", lambda alpha, _, *given: real(alpha, torch.bfloat16, *given))
        monkeypatch.setattr(ops, "_slack", lambda _: slack)
    scores = torch.zeros(count + 1)
    scores[count // 3] = gap / (alpha - 1)
    k = torch.zeros(1, 1, count + 1, 16)
    k[..., 0] = scores
    v = torch.zeros(1, 1, count + 1, 16)
    v[:, :, count // 3, 0], v[:, :, :, 1] = 1.0, 1.0
    q = torch.zeros(1, 1, 40, 16)
    q[..., 0] = 1.0
    q, k, v = (part.to(device, HALVES[-1]) for part in (q, k, v))
    exact = entmax(q[0, 0].double() @ k[0, 0].double().mT, alpha)[0]
    wanted = exact[count // 3].item()
    made = ops._Outputs(*ops.long_attention(q, k, v, None, None, None, alpha, 1.0, False, grad, False))
    assert (made.out[0, 0, :, 0].double() - wanted).abs().max() < 0.012
    assert (made.out[0, 0, :, 1].double() - 1).abs().max() < 0.005


def packed(layout: list[list[int]], device: torch.device) -> Tensor:
    """Documents of given ids and lengths, one after the other."""
    return torch.cat([torch.full((length,), number) for number, length in layout])[None].to(device)


LAYOUTS = {
    "one": [[7, 260]],
    "two": [[0, 130], [1, 130]],
    "as_wide_as_tiles": [[3, 128], [2, 64], [1, 68]],
    "many": [[number, 9] for number in range(28)] + [[99, 8]],
    "ids_that_differ_in_their_high_bits": [[5, 100], [5 + 2**32, 70], [5 - 2**33, 90]],
    "one_in_two_parts": [[1, 100], [0, 64], [1, 96]],
}
PACKED = [(name, alpha, False) for name in LAYOUTS for alpha in (1.0, 1.5, 2.0) if alpha == 1.5 or "two" in name]


@pytest.mark.parametrize(("layout", "alpha", "small_ids"), [*PACKED, ("two", 1.5, True)])
def test_documents_see_themselves_alone(layout: str, alpha: float, small_ids: bool, device: torch.device) -> None:
    documents = packed(LAYOUTS[layout], device)
    if small_ids:
        documents = documents.unique(return_inverse=True)[1].int()
    generator = torch.Generator().manual_seed(0)
    q, k, v, direction = (torch.randn(1, 1, 260, 16, generator=generator).to(device) for _ in range(4))
    slopes = torch.tensor([0.02], device=device)
    results = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        given = [part.to(dtype).requires_grad_() for part in (q, k, v, slopes)]
        out = attention(*given[:3], alpha=alpha, slopes=given[3], documents=documents, impl=impl)
        results.append([out, *torch.autograd.grad(out, given, direction.to(dtype))])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).abs().max() <= 2e-5 * max(1.0, expected.detach().abs().max().item())


def test_a_tile_within_one_document_needs_no_mask(device: torch.device) -> None:
    documents = packed([[0, 640], [1, 896]], device)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 1536, 64, generator=generator).to(device, HALVES[-1]) for _ in range(3))
    made = ops._Outputs(*ops.long_attention(q, k, v, None, None, documents, 1.5, 0.01, True, True, False))
    tiles = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 7]  # of 128 keys that each block of 128 queries sees, all of them live
    assert made.counts[0, 0].tolist() == [[1, count] for count in tiles]
    assert (made.live == 2).sum() == len(tiles)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint64], ids=str
)
def test_ids_of_any_size_stay_apart(dtype: torch.dtype, device: torch.device) -> None:
    ids = torch.tensor([[0, 1, 1, 0, 1]])
    if dtype.itemsize == 8:
        ids = ids * 2**32 + 5
    small = ops.small_ids(ids.to(dtype).to(device))
    assert small.dtype == torch.int32
    assert torch.equal(small[0, :, None] == small[0], (ids[0, :, None] == ids[0]).to(device))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("signs", [(1, -1, -1, 1, -1), (-1, -1, -1, -1, -1), (-1, 1, -1, -1, 1)], ids=str)
def test_scores_below_0_are_compared_as_those_above(
    signs: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Blocks of 128 keys whose scores are all positive or all negative; the survey has a quick way for the former."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 640, 64, generator=generator) for _ in range(3))
    shared = torch.nn.functional.one_hot(torch.tensor(0), 64) * 7.0
    q, k = q + shared, k + shared * torch.tensor(signs).repeat_interleave(128)[:, None]
    q, k, v = (part.to(device, dtype) for part in (q, k, v))
    out, stats = attention(q, k, v, scale=0.25, impl="triton", return_stats=True)
    exact = attention(q.double(), k.double(), v.double(), scale=0.25, impl="reference")
    assert (out.double() - exact).abs().max() < 0.02
    assert stats.block_sparsity is not None
    hidden = sum(signs[key] < max(signs[: row + 1]) for row in range(5) for key in range(row + 1))
    assert round(15 * float(stats.block_sparsity)) >= hidden
