"""What attention never makes: scores of keys that cannot live, rows nobody asked for, the square of the length."""

import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import Case, attend, call_of, gradients, map_call_of
from torch import Tensor

from longspan import attention_weights
from longspan.functional import chunked, reference, survivors
from longspan.functional.scores import Rules, score_block


@dataclass
class ScoredBlock:
    slope: float
    rows: Tensor
    keys: Tensor


def spy_on_blocks(monkeypatch: pytest.MonkeyPatch, module: object) -> list[ScoredBlock]:
    """Record every block of scores that the module makes."""
    blocks: list[ScoredBlock] = []

    def spy(q: Tensor, k: Tensor, rules: Rules, rows: Tensor, keys: Tensor) -> Tensor:
        assert q.shape[2] == len(rows)
        assert k.shape[2] == len(keys)
        slope = 0.0 if rules.slopes is None else float(rules.slopes.detach()[0])
        blocks.append(ScoredBlock(slope, rows.cpu(), keys.cpu()))
        return score_block(q, k, rules, rows, keys)

    monkeypatch.setattr(module, "score_block", spy)
    return blocks


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("logits", [0.1, 1.0, 5.0])
def test_alibi_skips_keys_and_only_dead_ones(
    alpha: float, logits: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    time, slopes = 700, (4.0, 1.0, 0.25, 0.0)
    monkeypatch.setattr(chunked, "_MOST_ROWS", 64)
    case = Case(1, 4, 1, time, time, 16, 4, alpha=alpha, slopes=slopes, logits=logits)
    call = call_of(case, device=device)
    blocks = spy_on_blocks(monkeypatch, chunked)
    attend(call, "chunked")
    monkeypatch.undo()
    weights = attention_weights(**map_call_of(case, device))[0].detach().cpu()
    for head, slope in enumerate(slopes):
        own = [block for block in blocks if block.slope == slope]
        touched = torch.zeros(time, time, dtype=torch.bool)
        for block in own:
            touched[block.rows[:, None], block.keys] = True
        assert bool((weights[head][~touched] == 0).all())
        longest = max(len(block.keys) for block in own)
        # No product exceeds the largest norms, so nothing beyond this distance can live.
        norms = [float(call[name].detach().norm(dim=-1).max()) for name in ("q", "k")]
        reach = (2 * math.prod(norms) / math.sqrt(case.dim) + 1 / (alpha - 1)) / slope if slope else time
        rows = max(len(block.rows) for block in own)
        assert longest <= min(time, rows + 1.01 * reach + 2 * chunked._KEY_BLOCK)
        assert longest == time or slope > 0


@pytest.mark.parametrize("few", [True, False])
def test_steep_slopes_make_short_windows(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the shipped block sizes, forward and backward; where few keys survive, the backward makes no scores."""
    time = 4096
    if not few:
        monkeypatch.setattr(survivors, "_SHORTEST", time)
    call = call_of(Case(1, 1, 1, time, time, 16, 4, slopes=(1.0,), logits=0.5), torch.float32)
    blocks = spy_on_blocks(monkeypatch, chunked)
    out = attend(call, "chunked")
    forward = len(blocks)
    gradients(out, call)
    assert forward >= time // 512
    assert len(blocks) == (forward if few else 2 * forward)
    assert max(len(block.keys) for block in blocks) <= 512 + 128


@pytest.mark.parametrize(
    "options",
    [{"alpha": 1.0, "slopes": (5.0,)}, {"slopes": (0.0,)}, {"slopes": (-1.0,)}, {"slopes": None}],
    ids=["softmax", "no_slope", "negative_slope", "no_slopes"],
)
def test_nothing_of_the_past_is_skipped_without_a_reason(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "_MOST_ROWS", 64)
    blocks = spy_on_blocks(monkeypatch, chunked)
    attend(call_of(Case(1, 1, 1, 300, 300, **options)), "chunked")
    assert [len(block.keys) for block in blocks] == [64, 128, 192, 256, 300]


def test_skips_other_documents_and_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "_MOST_ROWS", 50)
    call = call_of(Case(1, 1, 1, 400, 400))
    call["documents"] = (torch.arange(400) // 100)[None]
    call["lengths"] = torch.tensor([300])
    blocks = spy_on_blocks(monkeypatch, chunked)
    attend(call, "chunked")
    assert [(int(block.keys[0]), len(block.keys)) for block in blocks] == [
        (start, length) for start in (0, 100, 200) for length in (50, 100)
    ]


CHOSEN: dict[str, list[int] | Tensor] = {
    "list": [0, 5, 3],
    "repeated": [2, 2],
    "negative": [-1, -11, 4],
    "tensor": torch.tensor([7, -2]),
    "none_of_them": [],
}


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(slopes=(0.5, 0.0)), id="slopes"),
        pytest.param(Case(heads=4, kv_heads=2, query_time=11, key_time=15, alpha=2.0), id="grouped"),
        pytest.param(Case(documents="interleaved", lengths=(11, 6)), id="packed_and_padded"),
        pytest.param(Case(causal=False, alpha=(1.5, 3.0)), id="future"),
    ],
)
def test_chosen_rows_of_the_map(name: str, case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = CHOSEN[name]
    call = map_call_of(case, device)
    full = attention_weights(**call)
    blocks = spy_on_blocks(monkeypatch, reference)
    chosen = attention_weights(**call, rows=rows)
    assert [len(block.rows) for block in blocks] == [len(rows)]
    index = [int(row) % case.query_time for row in rows]
    torch.testing.assert_close(chosen, full[:, :, index], rtol=0, atol=1e-12)


def test_a_row_of_a_long_map_costs_a_row() -> None:
    """The whole map would be 160 GB."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 200_000, 4, generator=generator).unbind()
    weights = attention_weights(q, k, rows=[-1, 100], slopes=torch.tensor([0.01]))
    assert weights.shape == (1, 1, 2, 200_000)
    assert bool((weights[0, 0, 1, 101:] == 0).all())
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 2))


def test_weights_are_differentiable_and_in_the_dtype_of_q(device: torch.device) -> None:
    call = call_of(Case(), torch.bfloat16, device)
    weights = attention_weights(call["q"], call["k"], rows=[3])
    assert weights.dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(weights.square().sum(), call["q"])
    assert bool((gradient[:, :, :3] == 0).all())
    assert bool((gradient[:, :, 3] != 0).any())


def test_reference_in_blocks_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(Case(query_time=9, key_time=13))
    expected = attend(call, "reference")
    monkeypatch.setattr(reference, "_SCORES_AT_ONCE", 2 * 2 * 13 * 4)
    blocks = spy_on_blocks(monkeypatch, reference)
    with torch.no_grad():
        torch.testing.assert_close(attend(call, "reference"), expected, rtol=0, atol=1e-14)
    assert [len(block.rows) for block in blocks] == [4, 4, 1]


MEMORY_SCRIPT = """
import torch
from longspan import attention

def kibibytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))

torch.set_num_threads(1)

def run(time):
    q, k, v = (torch.randn(1, 1, time, 32).requires_grad_() for _ in range(3))
    before = kibibytes("VmRSS:")
    attention(q, k, v, impl="chunked").sum().backward()
    return kibibytes("VmHWM:") - before

run(64)  # what the first use of every operation loads is not the attention's
print(run(32768))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
def test_memory_is_linear_in_the_length() -> None:
    """One head of 32 at 32,768 tokens, whose map alone is 4 GiB, in under 1 GiB forward and backward.

    The peak is the kernel's VmHWM and not `ru_maxrss`, which a child inherits from the pytest that started it.
    """
    command = [sys.executable, "-c", MEMORY_SCRIPT]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)
    assert peak < 1 << 20


def test_a_key_within_rounding_of_the_bound_is_alive() -> None:
    """A slope that by a hair does not kill the first block of keys, as far as their norm and the query's tell."""
    alpha, scale = 1.5, 0.1
    for seed in range(20):
        query, key = torch.randn(2, 33, generator=torch.Generator().manual_seed(seed)) * 10
        q, norm = query[None, None], torch.linalg.vector_norm(key)
        exact = scale * float(query.double().norm() * key.double().norm())
        slope = (exact + 1 / (alpha - 1)) * (1 - 1e-8)  # at a distance of 1
        norms = torch.stack([norm, torch.zeros(())])[None]
        assert chunked._first_key(q, torch.zeros_like(q), norms, slope, alpha, scale, chunked._KEY_BLOCK + 1) == 0
