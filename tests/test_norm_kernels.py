"""The kernel of norms and residual against a float64 oracle: in Triton's interpreter on a CPU, compiled on a GPU."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longspan.nn import residual
from longspan.nn.decoder import AttentionConfig, Block, Decoder, DecoderConfig
from longspan.nn.norm import RMSNorm
from longspan.train.copies import LowCopies

pytest.importorskip("triton")

from longspan.kernels import norms

ON_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="the interpreter is silently wrong in bf16")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
PARTS = ["after", "before", "both", "stream_and_before"]
SHAPES = {
    "one_row": (1, 1, 8),
    "few_rows": (1, 7, 40),
    "padded_dims": (2, 65, 300),
    "the_papers_dims": (2, 65, 256),
    "rows_beyond_the_programs": (3, 11_003, 8) if ON_GPU else (2, 150, 300),
}


@dataclass(frozen=True)
class Inputs:
    x: Tensor
    y: Tensor | None
    after: Tensor | None
    before: Tensor | None
    keep: bool
    dtype: torch.dtype  # of z

    def differentiable(self) -> dict[str, Tensor]:
        found = {"x": self.x, "y": self.y, "after": self.after, "before": self.before}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def arguments(self) -> tuple[Any, ...]:
        return self.x, self.y, self.after, self.before, self.keep, self.dtype


def made(
    shape: tuple[int, int, int], parts: str, dtype: torch.dtype, device: torch.device, before_them: int = 0
) -> Inputs:
    """Inputs for some parts; y and z in a dtype. x and y are the last tokens of sequences longer by `before_them`."""
    batch, time, dim = shape
    draw = torch.Generator().manual_seed(sum(shape))

    def tokens(size: float) -> Tensor:
        longer = size * torch.randn(batch, time + before_them, dim, generator=draw)
        return longer.to(device)[:, before_them:]

    x, y = tokens(3.0), tokens(0.5).to(dtype)
    after, before = (1 + 0.3 * torch.randn(dim, generator=draw).to(device) for _ in range(2))
    has_after, has_before = parts in ("after", "both"), parts != "after"
    return Inputs(
        x.requires_grad_(),
        y.requires_grad_() if has_after else None,
        after.requires_grad_() if has_after else None,
        before.requires_grad_() if has_before else None,
        parts != "before",
        dtype,
    )


def in_float64(inputs: Inputs) -> Inputs:
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.differentiable().items()}
    return Inputs(
        exact["x"], exact.get("y"), exact.get("after"), exact.get("before"), inputs.keep, torch.float64
    )  # fmt: skip


def by_kernel(inputs: Inputs) -> dict[str, Tensor]:
    h, z, _ = norms.residual_norms(*inputs.arguments())
    return {name: value for name, value in (("h", h), ("z", z)) if value.numel()}


def by_torch(inputs: Inputs) -> dict[str, Tensor]:
    def rms(values: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.rms_norm(values.to(weight.dtype), weight.shape, weight, norms.EPSILON)

    h = inputs.x
    if inputs.y is not None and inputs.after is not None:
        h = h + rms(inputs.y, inputs.after)
    found = {"h": h} if inputs.keep else {}
    return found if inputs.before is None else found | {"z": rms(h, inputs.before).to(inputs.dtype)}


def gradients(inputs: Inputs, outputs: dict[str, Tensor], used: set[str]) -> dict[str, Tensor]:
    """Of the used outputs, from gradients that every dtype holds exactly."""
    arrived = {}
    for seed, name in enumerate(sorted(used & outputs.keys())):
        drawn = torch.randn(outputs[name].shape, generator=torch.Generator().manual_seed(seed))
        arrived[name] = drawn.bfloat16().to(outputs[name])
    sources = inputs.differentiable()
    found = torch.autograd.grad([outputs[name] for name in arrived], list(sources.values()), list(arrived.values()),
                                allow_unused=True)  # fmt: skip
    return {f"d_{name}": value for name, value in zip(sources, found, strict=True) if value is not None}


def results(compute: Any, inputs: Inputs, used: set[str]) -> dict[str, Tensor]:
    outputs = compute(inputs)
    return {name: value.detach() for name, value in outputs.items()} | gradients(inputs, outputs, used)


def check_against_the_oracle(inputs: Inputs, used: set[str]) -> None:
    """As close as plain torch in the same dtypes, but for a rounding."""
    ours, plain = (results(compute, inputs, used) for compute in (by_kernel, by_torch))
    exact = results(by_torch, in_float64(inputs), used)
    assert ours.keys() == exact.keys()
    for name, value in exact.items():
        assert ours[name].dtype == plain[name].dtype, name
        error, theirs = (float((found[name].double() - value).abs().max()) for found in (ours, plain))
        assert error <= 2 * theirs + 4 * torch.finfo(torch.float32).eps * float(value.abs().max()), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", SHAPES)
def test_kernel_is_as_close_to_the_oracle_as_plain_torch(
    name: str, parts: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "rows_beyond_the_programs" and not ON_GPU:
        monkeypatch.setattr(norms, "_programs", lambda rows, at_once: 5)
    check_against_the_oracle(made(SHAPES[name], parts, dtype, device), {"h", "z"})


@pytest.mark.parametrize("parts", PARTS)
def test_the_last_tokens_of_longer_sequences(parts: str, device: torch.device) -> None:
    check_against_the_oracle(made((3, 7, 40), parts, torch.float16, device, before_them=5), {"h", "z"})


@pytest.mark.parametrize("used", ["h", "z"])
@pytest.mark.parametrize("parts", ["both", "stream_and_before"])
def test_an_output_that_nobody_uses_has_no_gradient(parts: str, used: str, device: torch.device) -> None:
    check_against_the_oracle(made((2, 7, 40), parts, torch.float32, device), {used})


@pytest.mark.parametrize("parts", PARTS)
def test_rows_of_zeros_are_finite(parts: str, device: torch.device) -> None:
    inputs = made((2, 7, 40), parts, torch.float32, device)
    with torch.no_grad():
        for tensor in (inputs.x, inputs.y):
            if tensor is not None:
                tensor[:, 2:5] = 0
    check_against_the_oracle(inputs, {"h", "z"})
    assert all(value.isfinite().all() for value in results(by_kernel, inputs, {"h", "z"}).values())


@pytest.mark.parametrize("parts", PARTS)
def test_no_rows(parts: str, device: torch.device) -> None:
    inputs = made((2, 0, 40), parts, torch.float32, device)
    h, z, _ = norms.residual_norms(*inputs.arguments())
    found = torch.autograd.grad(h.sum() + z.float().sum(), list(inputs.differentiable().values()), allow_unused=True)
    assert all((gradient == 0).all() for gradient in found if gradient is not None)


def test_gradients_of_any_strides(device: torch.device) -> None:
    """Expanded, transposed, and as a slice of more."""
    inputs = made((2, 7, 40), "both", torch.float32, device)
    h, z, _ = norms.residual_norms(*inputs.arguments())
    sources = list(inputs.differentiable().values())
    arrived = torch.randn(2, 40, 14, device=device)
    strided = {
        "scalar": torch.ones((), device=device).expand_as(h),
        "transposed": arrived.mT[:, :7],
        "every_other": arrived.mT.contiguous()[:, ::2],
        "one_for_all_rows": arrived[:, :1, :1].expand(2, 7, 40),
        "one_row_for_all": torch.randn(40, device=device).expand_as(h),
    }
    for name, gradient in strided.items():
        found, wanted = (
            torch.autograd.grad([h, z], sources, [d, d.flip(0)], retain_graph=True)
            for d in (gradient, gradient.contiguous())
        )
        for mine, theirs in zip(found, wanted, strict=True):
            # On a GPU how a stride divides decides how wide a load is, and so the order of a row's sums.
            assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5) if ON_GPU else torch.equal(mine, theirs), name


@pytest.mark.parametrize("parts", PARTS)
def test_repeated_calls_give_the_same_bits(parts: str, device: torch.device) -> None:
    inputs = made((2, 65, 40), parts, torch.float32, device)
    first, again = (results(by_kernel, inputs, {"h", "z"}) for _ in range(2))
    assert all(torch.equal(first[key], again[key]) for key in first)


@pytest.mark.parametrize("parts", PARTS)
def test_the_operators_are_registered_well(parts: str, device: torch.device) -> None:
    inputs = made((2, 7, 40), parts, torch.float16, device)
    torch.library.opcheck(norms.residual_norms, inputs.arguments())
    h, z, inverse = (output.detach() for output in norms.residual_norms(*inputs.arguments()))
    x, y, after, before = (
        None if tensor is None else tensor.detach() for tensor in (inputs.x, inputs.y, inputs.after, inputs.before)
    )
    arguments = (h if inputs.keep else None, None if before is None else z, x, y, after, before, inverse)
    torch.library.opcheck(norms.residual_norms_backward, arguments)


def test_compiles_whole_and_serves_other_lengths(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual, "fused", lambda x, *norms: True)

    def computed(x: Tensor, y: Tensor, after: RMSNorm, before: RMSNorm, reader: nn.Linear) -> Tensor:
        x, z = residual.merge_and_branch(x[:, 3:], y, after, before, reader)
        x, w = residual.branch(residual.merge(x, reader(z), after), before, reader)
        return residual.normed(x + reader(w), before, reader).float() * x

    compiled = torch.compile(computed, fullgraph=True, dynamic=True, backend="inductor" if ON_GPU else "aot_eager")
    torch.manual_seed(0)
    half, dim = (torch.bfloat16, 256) if ON_GPU else (torch.float16, 24)
    layers = RMSNorm(dim).to(device), RMSNorm(dim).to(device), nn.Linear(dim, dim).to(device, half)
    for time in (40, 41, 77):
        x = torch.randn(4, time + 3, dim, device=device, requires_grad=True)
        y = torch.randn(4, time, dim, device=device, dtype=half, requires_grad=True)
        sources = [x, y, *(parameter for layer in layers for parameter in layer.parameters())]
        found, wanted = (
            [out.detach(), *torch.autograd.grad(out.square().sum(), sources)]
            for out in (compiled(x, y, *layers), computed(x, y, *layers))
        )
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0.02 * float(theirs.abs().max()))


def decoder(device: torch.device) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig(13, layers=2, dim=24, hidden=40, heads=4, attention=AttentionConfig(method="softmax"))
    built = Decoder(config)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return built.to(device)


def outcome(model: Decoder, tokens: Tensor, last: int | None) -> list[Tensor]:
    logits = model(tokens, last=last)
    weights = torch.linspace(-1, 1, logits.numel(), device=logits.device).view_as(logits)
    return [logits.detach(), *torch.autograd.grad((logits * weights).sum(), tuple(model.parameters()))]


@pytest.mark.parametrize("last", [None, 8], ids=["all", "last"])
def test_a_decoder_with_the_kernel_is_one_without(
    last: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = decoder(device), torch.randint(13, (3, 21), generator=torch.Generator().manual_seed(1)).to(device)
    found = []
    for by_kernel in (True, False):
        monkeypatch.setattr(residual, "fused", lambda x, *norms, answer=by_kernel: answer)
        found.append(outcome(model, tokens, last))
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max()))


@needs_gpu
@pytest.mark.parametrize("last", [None, 8], ids=["all", "last"])
def test_training_in_bfloat16_is_near(last: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With matrices in bfloat16 under autocast: both round the same activations, and add up gradients otherwise."""
    model = LowCopies(decoder(device)).model
    tokens = torch.randint(13, (3, 21), generator=torch.Generator().manual_seed(1)).to(device)
    found = []
    for by_kernel in (True, False):
        monkeypatch.setattr(residual, "fused", lambda x, *norms, answer=by_kernel: answer)
        with torch.autocast(device.type, torch.bfloat16):
            found.append(outcome(model, tokens, last))
    for mine, plain in zip(*found, strict=True):
        assert mine.dtype == plain.dtype
        torch.testing.assert_close(mine, plain, rtol=0, atol=0.05 * float(plain.abs().max()))


def test_what_a_layer_reads_has_the_precision_of_its_weights(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residual, "fused", lambda x, *norms: True)
    x, norm = torch.randn(2, 3, 16, device=device), RMSNorm(16).to(device)
    for dtype in DTYPES:
        reader = nn.Linear(16, 4).to(device, dtype)
        stream, read = residual.branch(x, norm, reader)
        assert (stream.dtype, read.dtype) == (torch.float32, dtype)
        assert torch.equal(residual.normed(x, norm, reader), read)
    assert residual.normed(x, norm, nn.Identity()).dtype == torch.float32


def test_who_takes_the_kernel(device: torch.device) -> None:
    """A GPU in training, in float32, with norms that are ours and as they were made."""
    block = Block(DecoderConfig(13, layers=1, dim=24, hidden=40, heads=4)).to(device)
    x, norm = torch.randn(2, 3, 24, device=device), block.before_attention
    assert residual.fused(x, norm) == ON_GPU
    with torch.no_grad():
        assert not residual.fused(x, norm)
    other = nn.RMSNorm(24, device=device)
    assert not residual.fused(x, norm, other)  # type: ignore[arg-type]
    assert not residual.fused(x, RMSNorm(24, eps=1e-5).to(device))
    assert not residual.fused(x.double(), RMSNorm(24).to(device).double())
    assert not residual.fused(x, RMSNorm(24).to(device, torch.bfloat16))
    assert not residual.fused(x, RMSNorm(residual.WIDEST + 1).to(device))
