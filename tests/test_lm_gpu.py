"""A language model's blocks compiled for a GPU: their gradients are those of the same blocks as they are written."""

import pytest
import torch
from test_lm_model import METHODS, POSITIONS, model
from torch import Tensor, nn

from longspan.train.lm import summed_losses

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gradients(built: nn.Module, tokens: Tensor, documents: Tensor) -> dict[str, Tensor]:
    built.zero_grad()
    logits = built(tokens[:, :-1], documents=documents)
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return {name: parameter.grad.clone() for name, parameter in built.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("method", METHODS)
def test_compiled_blocks_have_the_gradients_of_plain_ones(method: str, position: str) -> None:
    torch._dynamo.reset()
    torch.set_float32_matmul_precision("highest")
    built = model(method, position).float().cuda()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 50, (3, 521), generator=generator).cuda()
    documents = torch.tensor([0, 200, 230]).cuda()[:, None] <= torch.arange(520).cuda()
    expected = gradients(built, tokens, documents.sum(0).expand(3, -1).int())
    for block in built.blocks:
        block.compile()
    found = gradients(built, tokens, documents.sum(0).expand(3, -1).int())
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, atol=1e-3 * grad.abs().max().item() + 1e-6), name


def test_compiled_losses_are_plain_ones() -> None:
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 520, 1000, generator=generator).cuda().bfloat16().requires_grad_()
    targets = torch.randint(0, 1000, (3, 520), generator=generator).cuda()
    mask = torch.rand(3, 520, generator=generator).cuda() < 0.9
    results = []
    for judge in (summed_losses, torch.compile(summed_losses)):
        loss = judge(logits, targets, mask)
        results.append((loss.item(), torch.autograd.grad(loss, logits)[0].float()))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5)
    assert torch.allclose(results[1][1], results[0][1], atol=1e-4, rtol=1e-2)  # a digit of bfloat16
