"""The kernel of gated layers against a float64 oracle: in Triton's interpreter on a CPU, compiled on a GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from longspan.nn import gated as layer

pytest.importorskip("triton")

from longspan.kernels.gated import gated_gelu, gated_gelu_backward

ON_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]  # the interpreter is wrong in bf16
SHAPES = {
    "one_value": (1, 2),
    "odd": (3, 5, 2 * 37),
    "the_papers": (2, 33, 2 * 512),
    "wider_than_a_block": (7, 2 * 1100),
}


def plainly(joint: Tensor) -> Tensor:
    gate, up = joint.chunk(2, -1)
    return nn.functional.gelu(gate, approximate="tanh") * up


def with_gradient(compute: Callable[[Tensor], Tensor], joint: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    joint = joint.detach().requires_grad_()
    out = compute(joint)
    (d_joint,) = torch.autograd.grad(out, joint, d_out.to(out))
    return out.detach(), d_joint


def drawn(*shape: int, size: float = 2.0) -> Tensor:
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_as_close_to_the_oracle_as_plain_torch(name: str, dtype: torch.dtype, device: torch.device) -> None:
    shape = SHAPES[name]
    joint = drawn(*shape).to(device, dtype)
    d_out = drawn(*shape[:-1], shape[-1] // 2, size=1.0).to(device, dtype)
    found, plain = (with_gradient(compute, joint, d_out) for compute in (gated_gelu, plainly))
    exact = with_gradient(plainly, joint.double(), d_out.double())
    for mine, theirs, truth in zip(found, plain, exact, strict=True):
        assert mine.dtype == dtype
        error, plain_error = ((value.double() - truth).abs().max() for value in (mine, theirs))
        assert error <= plain_error + torch.finfo(dtype).eps * truth.abs().max()


def test_large_gates_pass_or_close_without_a_nan(device: torch.device) -> None:
    gate = torch.tensor([-3e38, -1e4, -60.0, -0.0, 0.0, 60.0, 1e4], device=device)
    joint = torch.cat([gate, torch.ones_like(gate)])[None]
    out, d_joint = with_gradient(gated_gelu, joint, torch.ones(1, 7))
    assert torch.equal(out[0], gate.clamp_min(0.0))
    assert torch.equal(d_joint[0, :7], torch.tensor([0, 0, 0, 0.5, 0.5, 1, 1], device=device))


def test_strided_inputs_and_gradients(device: torch.device) -> None:
    joint, d_out = drawn(6, 4, 80).to(device), drawn(40, 4, 6).to(device)
    transposed = joint.transpose(0, 1)
    for mine, theirs in zip(
        with_gradient(gated_gelu, transposed, d_out.permute(1, 2, 0)),
        with_gradient(gated_gelu, transposed.contiguous(), d_out.permute(1, 2, 0).contiguous()),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def test_nothing_gives_nothing(device: torch.device) -> None:
    out, d_joint = with_gradient(gated_gelu, torch.empty(0, 8, device=device), torch.empty(0, 4, device=device))
    assert out.shape == (0, 4)
    assert d_joint.shape == (0, 8)


def test_torch_may_trace_and_differentiate_it(device: torch.device) -> None:
    joint = drawn(3, 10).to(device).requires_grad_()
    torch.library.opcheck(gated_gelu, (joint,))
    torch.library.opcheck(gated_gelu_backward, (drawn(3, 5).to(device), joint.detach()))


@pytest.mark.parametrize("gate_kind", [nn.Linear, type("Adapted", (nn.Linear,), {})])
def test_a_layer_by_the_kernel_is_the_plain_layer(
    gate_kind: type[nn.Linear], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    gate = gate_kind(16, 24, bias=False).to(device)
    up = nn.Linear(16, 24, bias=False).to(device)
    x = torch.randn(2, 5, 16, device=device)
    wanted = nn.functional.gelu(gate(x), approximate="tanh") * up(x)
    assert torch.allclose(layer.gated(gate, up, x), wanted, atol=1e-6)
    if gate_kind is nn.Linear:
        assert layer.fused(gate, up, x) == (device.type == "cuda")
        monkeypatch.setattr(layer, "fused", lambda *_: True)
        assert torch.allclose(layer.gated(gate, up, x), wanted, atol=1e-6)
    else:
        assert not layer.fused(gate, up, x)  # what someone put there is called as it is
