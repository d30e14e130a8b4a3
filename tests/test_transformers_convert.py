"""`convert`: a pretrained model starts as it was, and is afterwards what its equations say."""

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from test_transformers_models import Copies
from tiny_transformers import FAMILIES, config_of, gradients, greedy, padded, sharpened, tiny, tokens
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import longspan
from longspan.integrations.transformers import AnnealAlpha, convert, longspan_attention, set_alpha
from longspan.integrations.transformers.attention import Parts
from longspan.nn.positions import exponential_slopes
from longspan.nn.scalers import log_length

METHODS = ("ssmax", "assmax", "entmax", "sentmax", "asentmax")


def converted(family: str, method: Any = "asentmax", position: Any = "nape", **options: Any) -> Any:
    """Converted at alpha 1.5, with scales that have learned something."""
    return sharpened(convert(tiny(family, "eager"), method, position, alpha=1.5, **options))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_keeping_its_positions_it_starts_as_the_original(family: str, method: Any) -> None:
    model = tiny(family, "eager").float()  # in float64, eager attention makes NaN of padding
    ids, mask = padded([tokens(1, 11)[0], tokens(1, 7)[0]], "left")
    before = model(ids, attention_mask=mask).logits
    assert convert(model, method, "keep") is model
    after = model(ids, attention_mask=mask).logits
    real = mask.bool()
    assert torch.allclose(before[real], after[real], atol=1e-4)
    with torch.no_grad():
        set_alpha(model, 1.5)
        assert not torch.allclose(model(ids, attention_mask=mask).logits[real], before[real], atol=1e-3)


def test_a_converted_layer_is_what_its_equations_say() -> None:
    """ASEntmax under NAPE written out, no rotation, a scale on the heads without a slope."""
    model = converted("llama")
    layer = model.model.layers[0].self_attn
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    q, k, v = (
        part(x).view(1, 9, -1, 8).transpose(1, 2) for part in (layer.q_proj, layer.k_proj, layer.v_proj)
    )  # (1, 4 or 2, 9, 8)
    scaler = layer.longspan.scaler
    n = torch.arange(1, 10)[None]
    beta, gamma = torch.nn.functional.softplus(scaler.beta(x)), 2 * scaler.gamma(x).tanh()
    scale = 0.95 + beta * log_length(n, x)[..., None] ** gamma  # (1, 9, 4)
    slopes = torch.tensor([2**-4, 2**-8, 0, 0], dtype=torch.float64)
    assert exponential_slopes(2).tolist() == [2**-4, 2**-8]
    out = torch.zeros(1, 4, 9, 8, dtype=torch.float64)
    for head in range(4):
        for i in range(9):
            products = q[0, head, i] @ k[0, head // 2, : i + 1].T / math.sqrt(8)
            products = products * (scale[0, i, head] if head >= 2 else 1)
            distances = i - torch.arange(i + 1)
            p = longspan.entmax(products - slopes[head] * distances, 1.5)
            out[0, head, i] = p @ v[0, head // 2, : i + 1]
    expected = layer.o_proj(out.transpose(1, 2).flatten(2))
    positions = torch.arange(9)[None]
    found, _ = layer(x, position_embeddings=model.model.rotary_emb(x, positions), attention_mask=None)
    assert torch.allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_need_not_say_how_wide_a_head_is(family: str, tmp_path: Path) -> None:
    """Those of Qwen 2 have no such field."""
    config = config_of(family).to_dict()
    del config["head_dim"]
    model = convert(AutoModelForCausalLM.from_config(type(config_of(family))(**config)).eval())
    ids = tokens(1, 9)
    model.save_pretrained(tmp_path)
    assert torch.allclose(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits, atol=1e-5)


@pytest.mark.parametrize("position", ["nape", "keep"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_and_packing_change_no_row(family: str, position: str) -> None:
    """n and the distances count the tokens a row sees, wherever it stands."""
    model = converted(family, position=position)
    rows = [tokens(1, time, seed=time)[0] for time in (13, 9, 4)]
    with torch.no_grad():
        alone = [model(row[None]).logits[0] for row in rows]
        for side in ("left", "right"):
            ids, mask = padded(rows, side)
            together = model(ids, attention_mask=mask).logits
            for number, row in enumerate(alone):
                assert torch.allclose(together[number][mask[number].bool()], row, atol=1e-5)
        positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
        packed = model(torch.cat(rows)[None], position_ids=positions, use_cache=False).logits[0]
        assert torch.allclose(packed, torch.cat(alone), atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 4}])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cache_generates_what_no_cache_does(family: str, options: dict[str, Any]) -> None:
    model = converted(family)
    ids, mask = padded([tokens(1, 9)[0], tokens(1, 5)[0]], "left")
    expected = greedy(model, ids, attention_mask=mask, use_cache=False)
    assert torch.equal(greedy(model, ids, attention_mask=mask, **options), expected)


@pytest.mark.parametrize("method", ["ssmax", "sentmax", "asentmax"])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded_it_has_its_scales(family: str, method: str, tmp_path: Path) -> None:
    model = converted(family, method).float()
    model.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(back).__name__ == f"Longspan{type(model).__bases__[1].__name__}"
    assert (back.config.longspan_alpha, back.config.longspan_method) == (1.5, method)
    ids = tokens(2, 9)
    assert torch.allclose(back(ids).logits, model(ids).logits, atol=1e-5)
    learned = [name for name, _ in back.named_parameters() if ".longspan." in name]
    assert learned
    assert all(torch.equal(back.get_parameter(name), model.get_parameter(name)) for name in learned)


def test_a_model_of_the_same_config_stays_as_it_is() -> None:
    config = config_of("llama")
    models = LlamaForCausalLM(config), LlamaForCausalLM(config)
    one = convert(models[0])
    assert type(config) is LlamaConfig
    assert models[1].config is config
    assert config._attn_implementation != "longspan"
    held = [part.config for part in one.modules() if hasattr(part, "config")]
    assert len(held) > 2
    assert all(part is one.config for part in held)


def test_it_can_be_pickled() -> None:
    """For whoever sends it to another process."""
    model = converted("llama")
    back = pickle.loads(pickle.dumps(model))
    assert type(back) is type(model)
    assert type(pickle.loads(pickle.dumps(model.config))) is type(model.config)
    ids = tokens(1, 5)
    assert torch.equal(back(ids).logits, model(ids).logits)


def test_one_from_a_config_starts_with_a_scale_of_one() -> None:
    config = converted("llama").config
    fresh = AutoModelForCausalLM.from_config(config)
    parts = fresh.model.layers[0].self_attn.longspan
    assert isinstance(parts, Parts)
    x, n = torch.randn(1, 3, 32), torch.tensor([[1, 10, 100_000]])
    scale = parts.scaler(x, n)
    assert scale is not None
    assert torch.allclose(scale, torch.ones(()))


def test_an_original_checkpoint_loads_into_the_converted_class(tmp_path: Path) -> None:
    original = tiny("qwen2", "eager").float()
    original.save_pretrained(tmp_path)
    made = type(converted("qwen2"))
    config = made.config_class(**original.config.to_dict() | {"longspan_position": "keep"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.modeling_utils.logger.warning", lambda *args: None)
        model = made.from_pretrained(tmp_path, config=config)
    ids = tokens(1, 9)
    assert torch.allclose(model(ids).logits, original(ids).logits, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_gradient_checkpointing_changes_no_gradient(family: str) -> None:
    model = converted(family).train()
    ids = tokens(2, 9)
    model(ids, labels=ids, use_cache=False).loss.backward()
    expected = gradients(model)
    assert any(name.endswith("longspan.scaler.beta.weight") and grad.any() for name, grad in expected.items())
    model.gradient_checkpointing_enable()
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert all(torch.allclose(grad, expected[name], atol=1e-9) for name, grad in gradients(model).items())


def test_maps_have_the_slopes_and_scales() -> None:
    model = converted("llama")
    ids, mask = padded([tokens(1, 9)[0], tokens(1, 5)[0]], "left")
    maps = model(ids, attention_mask=mask, output_attentions=True).attentions
    alone = model(ids[1:, 4:], output_attentions=True).attentions
    for together, row in zip(maps, alone, strict=True):
        assert torch.allclose(together[1, :, 4:, 4:], row[0], atol=1e-6)
        assert torch.allclose(row.sum(-1), torch.ones((), dtype=row.dtype))


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # by dynamo itself
def test_a_compiled_model_is_the_model() -> None:
    model = converted("llama")
    ids, mask = padded([tokens(1, 9)[0], tokens(1, 7)[0]], "left")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    losses = []
    for form in (model, compiled):
        loss = form(ids, attention_mask=mask, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append((loss.detach(), gradients(model)))
    assert torch.allclose(losses[0][0], losses[1][0])
    assert all(torch.allclose(grad, losses[1][1][name], atol=1e-9) for name, grad in losses[0][1].items())
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_trainer_fine_tunes_it_from_softmax_to_entmax(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = convert(tiny("llama", "eager").float(), position="nape")
    before = {name: value.clone() for name, value in model.named_parameters() if ".longspan." in name}
    told = TrainingArguments(
        output_dir=str(tmp_path), max_steps=10, per_device_train_batch_size=8, report_to="none", use_cpu=True
    )
    told.disable_tqdm = True
    Trainer(model, told, train_dataset=Copies(), callbacks=[AnnealAlpha()]).train()
    assert model.config.longspan_alpha == 1.5
    assert before
    assert not any(torch.equal(value, model.get_parameter(name)) for name, value in before.items())


def test_what_cannot_be_converted_is_refused() -> None:
    gpt = AutoModelForCausalLM.from_config(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9))
    with pytest.raises(TypeError, match="cannot convert a GPT2LMHeadModel; what can be is LlamaForCausalLM"):
        convert(gpt)
    model = tiny("llama", "eager")
    with pytest.raises(ValueError, match="method must be one of softmax, ssmax"):
        convert(model, "topk")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="position must be 'nape' or 'keep'"):
        convert(model, position="alibi")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="alpha must be between 1 and 64"):
        convert(model, alpha=0.5)
    assert type(model).__name__ == "LlamaForCausalLM"  # as it was
    with pytest.raises(ValueError, match="at least 2 heads"):
        convert(tiny("llama", "eager", num_attention_heads=1, num_key_value_heads=1, hidden_size=8))
    convert(model)
    with pytest.raises(TypeError, match="cannot convert a LongspanLlamaForCausalLM"):
        convert(model)
    with pytest.raises(ValueError, match="runs 'longspan' attention, not 'sdpa'"):
        model.set_attn_implementation("sdpa")
    capped = convert(tiny("gemma2", "eager", attn_logit_softcapping=50.0))
    with pytest.raises(ValueError, match="attn_logit_softcapping = None"):
        capped(tokens(1, 4))


def test_a_scale_needs_the_layers_input() -> None:
    """A converted layer called without it, by code that does not know it, has no scale: its own forward passes it."""
    layer = converted("llama").model.layers[0].self_attn
    q = torch.randn(1, 4, 5, 8, dtype=torch.float64)
    plain = longspan_attention(layer, q, q, q, None)[0]
    given = longspan_attention(layer, q, q, q, None, layer_input=torch.randn(1, 5, 32, dtype=torch.float64))[0]
    assert not torch.allclose(plain, given)
