"""Decoding above alpha 2, where a row is known by its smallest survivor: small weights keep their digits."""

import pytest
import torch
from test_decode import DTYPES, ON_GPU, Step, assert_is_the_oracles, in_float64, made
from test_edges import CONTENTS, in_steps

from longspan.functional.decode import decode

NEAR = {name: CONTENTS[name] for name in CONTENTS if not name.endswith("-1000")}  # where scores have their digits


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else DTYPES[:1], ids=str)
@pytest.mark.parametrize("alpha", [3.0, 8.0, 64.0])
@pytest.mark.parametrize("name", NEAR)
def test_above_alpha_2_small_weights_keep_their_digits(
    name: str, alpha: float, dtype: torch.dtype, device: torch.device
) -> None:
    assert_is_the_oracles(made(Step(heads=1, room=130, alpha=alpha, content=NEAR[name]), dtype, device))


@pytest.mark.parametrize("alpha", [2.5, 8.0, 64.0, 1e30])
def test_above_alpha_2_the_same_keys_survive(alpha: float, device: torch.device) -> None:
    """Of scores that float32 has exactly, with many ties."""
    call = made(Step(heads=3, room=130, dim=16, value_dim=130, alpha=alpha, content=in_steps), torch.float32, device)
    call["v"] = torch.eye(130, device=device)[None, None]
    weights, exact = decode(**call, impl="triton"), decode(**in_float64(call), impl="reference")
    assert torch.equal(weights > 0, exact > 0)
    assert (weights - exact).abs().max() < 2e-6
