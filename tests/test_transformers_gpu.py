"""The integration on a GPU: the kernels under transformers' masks and caches, compiled, and in half precision."""

from typing import Any

import pytest
import torch
from tiny_transformers import gradients, greedy, padded, sharpened, tiny, tokens

from longspan.integrations.transformers import LongspanConfig, LongspanForCausalLM, convert
from longspan.nn.llama import preset

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KINDS = ("llama", "gemma2", "converted", "ours")


def model_of(kind: str) -> Any:
    """In float32 on a CPU, with heads of 16 dims."""
    sizes: dict[str, Any] = {"head_dim": 16} | ({"sliding_window": 200} if kind == "gemma2" else {})
    if kind == "ours":
        torch.manual_seed(0)
        return sharpened(LongspanForCausalLM(LongspanConfig.of(preset("tiny", 50), "llama"))).float()
    if kind == "converted":
        return sharpened(convert(tiny("llama", "eager", **sizes), alpha=1.5)).float()
    return tiny(kind, **sizes).float()


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_padded_and_packed_rows_are_the_cpus(kind: str) -> None:
    model = model_of(kind)
    rows = [tokens(1, time, seed=time)[0] for time in (300, 170, 90)]
    with torch.no_grad():
        alone = [model.double()(row[None]).logits[0].float() for row in rows]
        model.float().cuda()
        for side in ("left", "right"):
            ids, mask = (tensor.cuda() for tensor in padded(rows, side))
            together = model(ids, attention_mask=mask).logits.cpu()
            for number, row in enumerate(alone):
                assert torch.allclose(together[number][mask[number].bool().cpu()], row, atol=2e-3)
        positions = torch.cat([torch.arange(len(row)) for row in rows])[None].cuda()
        packed = model(torch.cat(rows)[None].cuda(), position_ids=positions, use_cache=False).logits[0].cpu()
        assert torch.allclose(packed, torch.cat(alone), atol=2e-3)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch records one on purpose, to begin its pool
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"compiled": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_every_cache_generates_what_no_cache_does(kind: str, options: dict[str, Any]) -> None:
    model = model_of(kind).cuda()
    ids, mask = (tensor.cuda() for tensor in padded([tokens(1, 190)[0], tokens(1, 150)[0]], "left"))
    expected = greedy(model, ids, attention_mask=mask, use_cache=False, most=20)
    if options.get("compiled"):  # transformers compiles the steps into a static cache by itself
        options = {"cache_implementation": "static", "disable_compile": False}
    found = greedy(model, ids, attention_mask=mask, most=20, **options)
    # A tie may fall another way; what went before it is the same.
    assert (found == expected).float().mean() > 0.9
    assert torch.equal(found[:, :5], expected[:, :5])


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_training_step_has_the_gradients_of_the_cpu(kind: str) -> None:
    model = model_of(kind)
    ids, mask = padded([tokens(1, 260)[0], tokens(1, 131)[0]], "right")
    labels = ids.masked_fill(mask == 0, -100)
    model(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
    expected = gradients(model)
    model.cuda()
    given = {"attention_mask": mask.cuda(), "labels": labels.cuda(), "use_cache": False}
    torch.compile(model, fullgraph=True)(ids.cuda(), **given).loss.backward()
    found = {name: grad.cpu() for name, grad in gradients(model).items()}
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, atol=1e-3 * grad.abs().max().item() + 1e-5), name


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_stays_near(kind: str) -> None:
    model = model_of(kind).cuda()
    ids = tokens(2, 300).cuda()
    with torch.no_grad():
        exact = model(ids).logits
        with torch.autocast("cuda", torch.bfloat16):
            mixed = model(ids).logits.float()
        half = model.to(torch.bfloat16)(ids).logits.float()
    for other in (mixed, half):
        assert (other - exact).norm() < 0.1 * exact.norm()
