"""``attn_implementation="longspan"``: eager attention with another normaliser, whatever the mask and the cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_transformers import FAMILIES, config_of, gradients, greedy, padded, sharpened, tiny, tokens
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Llama4TextConfig,
    OpenAIGPTConfig,
    PegasusXConfig,
    PreTrainedConfig,
    StaticCache,
)
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from longspan import entmax
from longspan.integrations.transformers import longspan_attention, set_alpha
from longspan.integrations.transformers.attention import Scoring, attend, attention_map
from longspan.integrations.transformers.masks import View, check_model

STYLES = ("llama", "qwen3", "gemma2")

# In float64 but for transformers' own rotations and softmax, which are in float32: hence 1e-6 where they take part.


@pytest.fixture
def eager_entmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes eager attention one with entmax 1.5 weights, by another library."""
    entmax15 = pytest.importorskip("entmax").entmax15

    def normalise(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return entmax15(scores.double(), dim=dim)

    monkeypatch.setattr(torch.nn.functional, "softmax", normalise)


def twin(model: Any, attention: str) -> Any:
    """The same weights with another attention."""
    config = type(model.config)(**model.config.to_dict())
    other = AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.usefixtures("eager_entmax")
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_gradients_are_those_of_eager_attention(family: str) -> None:
    ours = tiny(family)
    eager = twin(ours, "eager")
    ids = tokens(2, 13)
    outputs = [model(ids, labels=ids) for model in (ours, eager)]
    assert torch.allclose(outputs[0].logits, outputs[1].logits, atol=1e-6)
    for output in outputs:
        output.loss.backward()
    theirs = gradients(eager)
    assert all(torch.allclose(grad, theirs[name], atol=1e-6) for name, grad in gradients(ours).items())


@pytest.mark.parametrize("family", FAMILIES)
def test_alpha_1_is_softmax_and_alpha_is_saved(family: str, tmp_path: Path) -> None:
    ours = tiny(family)
    ids = tokens(2, 13)
    sparse = ours(ids).logits
    set_alpha(ours, 1.0)
    assert torch.allclose(ours(ids).logits, twin(ours, "eager")(ids).logits, atol=1e-6)
    set_alpha(ours, 2.0)
    assert not torch.allclose(ours(ids).logits, sparse, atol=1e-3)
    ours.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="longspan", dtype=torch.float64)
    assert back.config.longspan_alpha == 2.0
    assert torch.allclose(back(ids).logits, ours(ids).logits, atol=1e-6)


def test_alpha_may_come_with_the_config() -> None:
    model = tiny("llama", longspan_alpha=2.0)
    ids = tokens(1, 9)
    logits = model(ids).logits
    set_alpha(model, 1.5)
    assert not torch.allclose(model(ids).logits, logits, atol=1e-3)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_are_rows_alone(family: str, side: str) -> None:
    model = tiny(family)
    rows = [tokens(1, time, seed=time)[0] for time in (13, 9, 4)]
    ids, mask = padded(rows, side)
    with torch.no_grad():
        together = model(ids, attention_mask=mask).logits
        for number, row in enumerate(rows):
            alone = model(row[None]).logits[0]
            assert torch.allclose(together[number][mask[number].bool()], alone, atol=1e-6)
    assert together.isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_documents_alone(family: str) -> None:
    model = tiny(family)
    first, second = tokens(2, 9), tokens(2, 5, seed=2)
    positions = torch.cat([torch.arange(9), torch.arange(5)]).expand(2, -1)
    with torch.no_grad():
        packed = model(torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(first).logits, model(second).logits], 1)
        joined = model(torch.cat([first, second], 1), use_cache=False).logits
    assert torch.allclose(packed, alone, atol=1e-6)
    assert not torch.allclose(joined, alone, atol=1e-3)


CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "prefill in chunks": {"prefill_chunk_size": 4},
    "beams": {"num_beams": 2},
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cache_generates_what_no_cache_does(family: str, cache: str) -> None:
    """Prompt and answer are longer than the sliding window."""
    model = tiny(family)
    rows = [tokens(1, time, seed=time)[0] for time in (9, 5)]
    ids, mask = padded(rows, "left")
    beams = {key: value for key, value in CACHES[cache].items() if key == "num_beams"}
    expected = greedy(model, ids, attention_mask=mask, use_cache=False, **beams)
    assert torch.equal(greedy(model, ids, attention_mask=mask, **CACHES[cache]), expected)
    for number, row in enumerate(rows):
        assert torch.equal(greedy(model, row[None], use_cache=False, **beams)[0], expected[number])


@pytest.mark.parametrize("cache", ["dynamic", "prefill in chunks"])  # transformers 5.17 has no static one for chunks
def test_chunked_attention_generates_what_no_cache_does(cache: str) -> None:
    sizes = config_of("llama").to_dict() | {"model_type": "llama4_text", "intermediate_size_mlp": 48}
    layers = {"attention_chunk_size": 4, "num_local_experts": 2, "no_rope_layers": [1, 0]}
    torch.manual_seed(0)
    model = sharpened(
        AutoModelForCausalLM.from_config(Llama4TextConfig(**sizes | layers), attn_implementation="longspan")
    )
    assert model.config.layer_types == ["chunked_attention", "full_attention"]
    ids, mask = padded([tokens(1, time, seed=time)[0] for time in (9, 5)], "left")
    expected = greedy(model, ids, attention_mask=mask, use_cache=False)
    assert torch.equal(greedy(model, ids, attention_mask=mask, **CACHES[cache]), expected)


@pytest.mark.parametrize("family", STYLES)
def test_a_static_cache_takes_several_tokens_at_a_time(family: str) -> None:
    model = tiny(family)
    ids = tokens(2, 12)
    cache = StaticCache(config=model.config, max_cache_len=20)
    with torch.no_grad():
        pieces = [model(part, past_key_values=cache).logits for part in ids.split([5, 4, 1, 2], dim=1)]
        assert torch.allclose(torch.cat(pieces, 1), model(ids, use_cache=False).logits, atol=1e-6)


@pytest.mark.usefixtures("eager_entmax")
@pytest.mark.parametrize("family", STYLES)
def test_maps_are_those_of_eager_attention(family: str) -> None:
    ours = tiny(family)
    eager = twin(ours, "eager")
    ids, mask = padded([tokens(1, 9)[0], tokens(1, 6)[0]], "left")
    with torch.no_grad():
        maps, theirs = (model(ids, attention_mask=mask, output_attentions=True).attentions for model in (ours, eager))
    assert len(maps) == 2
    real = mask.bool()
    for one, other in zip(maps, theirs, strict=True):
        assert torch.allclose(one.transpose(1, 2)[real], other.transpose(1, 2)[real], atol=1e-6)
    assert ours(ids).attentions is None


def test_maps_of_a_static_cache_leave_its_room_empty() -> None:
    model = tiny("llama")
    ids = tokens(1, 7)
    full = model(ids, output_attentions=True, use_cache=False).attentions
    cache = StaticCache(config=model.config, max_cache_len=12)
    first = model(ids[:, :6], past_key_values=cache, output_attentions=True).attentions
    last = model(ids[:, 6:], past_key_values=cache, output_attentions=True).attentions
    for whole, start, end in zip(full, first, last, strict=True):
        stepwise = torch.cat([start, end], 2)
        assert stepwise.shape[-1] == 12
        assert torch.allclose(stepwise[..., :7], whole, atol=1e-9)
        assert not stepwise[..., 7:].any()


@pytest.mark.parametrize("family", STYLES)
def test_gradient_checkpointing_changes_no_gradient(family: str) -> None:
    model = tiny(family).train()
    ids = tokens(2, 9)
    model(ids, labels=ids, use_cache=False).loss.backward()
    expected = gradients(model)
    model.gradient_checkpointing_enable()
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert all(torch.allclose(grad, expected[name], atol=1e-9) for name, grad in gradients(model).items())


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # by dynamo itself
def test_a_compiled_model_is_the_model() -> None:
    """In one graph, with gradients, padded, and decoding into a static cache."""
    model = tiny("gemma2")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids, mask = padded([tokens(1, 9)[0], tokens(1, 7)[0]], "left")
    model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
    expected = gradients(model)
    compiled(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
    assert all(torch.allclose(grad, expected[name], atol=1e-9) for name, grad in gradients(model).items())
    wanted = greedy(model, ids, attention_mask=mask, most=5)
    forward = model.forward
    model.forward = torch.compile(forward, backend="eager", fullgraph=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = greedy(model, ids, attention_mask=mask, most=5, cache_implementation="static")
    assert torch.equal(found, wanted)
    # one for the prompt, one for the steps, and one more where a window fills up
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 4
    torch._dynamo.reset()


def test_masks_made_by_hand_are_obeyed() -> None:
    model = tiny("llama")
    ids = tokens(1, 8)
    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    seen[4:, :4] = False  # two documents
    expected = torch.cat([model(ids[:, :4]).logits, model(ids[:, 4:]).logits], 1)
    added = torch.zeros(8, 8, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    for mask in (seen, added):
        assert torch.allclose(model(ids, attention_mask=mask[None, None]).logits, expected, atol=1e-6)
    with pytest.raises(ValueError, match=r"booleans or of floats to add, got torch\.int64"):
        model(ids, attention_mask=seen.long()[None, None])
    q = torch.randn(1, 4, 8, 8)
    with pytest.raises(ValueError, match=r"must be \(batch, 1, queries, keys\)"):
        longspan_attention(model.model.layers[0].self_attn, q, q, q, torch.ones(8, 8))


@pytest.mark.parametrize("scores_at_once", [1 << 24, 4 * 9 * 2])  # all rows, and two of them
def test_a_token_that_sees_the_future_keeps_its_place(scores_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under slopes and a mask of a prefix, whose tokens see all of it."""
    monkeypatch.setattr("longspan.integrations.transformers.attention._SCORES_AT_ONCE", scores_at_once)
    places = torch.arange(9)
    seen = (places[:, None] >= places) | (places < 4)
    slopes = torch.tensor([0.5, 0.1, 0, 0], dtype=torch.float64)
    q, k, v = torch.randn(3, 1, 4, 9, 8, dtype=torch.float64)
    scores = q @ k.mT - slopes[:, None, None] * (places[:, None] - places).abs()
    expected = entmax(scores.masked_fill(~seen, -torch.inf), 1.5)
    view, scoring = View(9, dense=seen[None, None]), Scoring(1.5, 1.0, slopes)
    assert torch.allclose(attention_map(q, k, view, scoring), expected)
    assert torch.allclose(attend(q, k, v, view, scoring), expected @ v)


@pytest.mark.parametrize("left", [0, 3])
def test_chunks_are_the_masks_of_eager_attention(left: int) -> None:
    """Of a model with chunked attention: within a chunk of 4, also from the middle of one on."""
    config = config_of("llama", attention_chunk_size=4)
    x = torch.zeros(2, 11, 32)
    padding = (torch.arange(11) >= left).long().expand(2, -1)
    masks = {}
    for name in ("longspan", "sdpa"):
        config._attn_implementation = name
        masks[name] = create_chunked_causal_mask(config, x, padding, None, allow_is_causal_skip=False)
    assert torch.equal(masks["longspan"], masks["sdpa"])


def test_only_what_says_something_becomes_a_mask() -> None:
    config = config_of("llama")
    config._attn_implementation = "longspan"
    x, ones = torch.zeros(2, 5, 32), torch.ones(2, 5)
    assert create_causal_mask(config, x, None, None) is None
    assert create_causal_mask(config, x, ones, None, torch.arange(5)[None]) is None
    packed = create_causal_mask(config, x, None, None, torch.tensor([[0, 1, 0, 1, 2]]))
    assert packed is not None
    assert packed[:, 0, 0].tolist() == [[0, 0, 1, 1, 1]] * 2
    right = create_causal_mask(config, x, torch.tensor([[1, 1, 1, 1, 0]] * 2), None)
    assert right is not None
    assert right[:, 0, 0].tolist() == [[0, 0, 0, 0, -1]] * 2


@pytest.mark.parametrize("padding", [None, torch.tensor([[0, 0, 1, 1, 1]] * 2)])
@pytest.mark.parametrize("make", [create_causal_mask, create_sliding_window_causal_mask])
def test_a_model_that_reads_its_mask_gets_one(make: Any, padding: Tensor | None) -> None:
    """Which it asks for by not allowing that there is none; packed documents do not allow that either."""
    config = config_of("mistral")
    masks = {}
    for name in ("longspan", "sdpa"):
        config._attn_implementation = name
        masks[name] = make(config, torch.zeros(2, 5, 32), padding, None, allow_is_causal_skip=False)
    assert torch.equal(masks["longspan"], masks["sdpa"])
    config._attn_implementation = "longspan"
    packed = make(config, torch.zeros(1, 5, 32), None, None, torch.tensor([[0, 1, 0, 1, 2]]))
    assert packed[:, 0, 0].tolist() == [[0, 0, 1, 1, 1]]


def test_attention_without_order_sees_everything() -> None:
    model = tiny("llama")
    layer = model.model.layers[0].self_attn
    q, k, v = torch.randn(3, 1, 4, 6, 8, dtype=torch.float64)
    free = longspan_attention(layer, q, k, v, None, is_causal=False)[0]
    causal = longspan_attention(layer, q, k, v, None)[0]
    assert torch.allclose(free[:, -1], causal[:, -1])
    assert not torch.allclose(free[:, 0], causal[:, 0])


def test_half_precision_meets_a_rotation_in_float32() -> None:
    model = sharpened(tiny("llama")).float()
    ids = tokens(1, 9)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids).logits
    assert torch.allclose(logits.float(), model(ids).logits, atol=0.3)


def test_what_is_not_supported_is_refused() -> None:
    ids = tokens(1, 5)
    with pytest.raises(ValueError, match=r"set config\.attn_logit_softcapping = None"):
        tiny("gemma2", attn_logit_softcapping=50.0)(ids)
    dropping = tiny("llama", attention_dropout=0.1)
    assert dropping(ids).logits.isfinite().all()  # no dropout outside of training
    with pytest.raises(ValueError, match=r"no dropout, the model asks for 0\.1: set config\.attention_dropout = 0"):
        dropping.train()(ids)
    model = tiny("llama")
    q = torch.randn(1, 4, 5, 8)
    refused = {"s_aux": "attention sinks", "indices": "a choice of keys", "block_indices": "a choice of blocks"}
    for name, what in refused.items():
        option: dict[str, Any] = {name: torch.zeros(4)}
        with pytest.raises(ValueError, match=f"does not support {what}"):
            longspan_attention(model.model.layers[0].self_attn, q, q, q, None, **option)
    for alpha in (0.5, 65):
        with pytest.raises(ValueError, match="between 1 and 64"):
            set_alpha(model, alpha)
    with pytest.raises(ValueError, match='attn_implementation="longspan"'):
        set_alpha(tiny("llama", attention="sdpa"), 1.5)


def test_models_that_run_their_own_attention_are_refused() -> None:
    """Bloom would take a mask of None for no mask; OpenAI's GPT asks for none; Pegasus-X does not say it is causal."""
    sizes: dict[str, Any] = {"vocab_size": 50, "n_layer": 1, "n_head": 2}
    bloom, gpt = (
        AutoModelForCausalLM.from_config(config, attn_implementation="longspan")
        for config in (BloomConfig(hidden_size=8, **sizes), OpenAIGPTConfig(n_embd=8, **sizes))
    )
    with pytest.raises(ValueError, match="BloomForCausalLM cannot run longspan attention"):
        bloom(tokens(1, 5))
    for model in (bloom, gpt):
        with pytest.raises(ValueError, match="cannot run longspan attention"):
            set_alpha(model, 1.5)
    with pytest.raises(ValueError, match="PegasusXForConditionalGeneration cannot run longspan attention"):
        check_model(PegasusXConfig)
    check_model(PreTrainedConfig)  # of no model that is known


def test_what_wraps_a_model_may_have_a_config_of_its_own() -> None:
    model = tiny("llama")
    wrapper = torch.nn.ModuleList([model])
    wrapper.config = {"learning_rate": 1e-3}  # type: ignore[assignment]
    set_alpha(wrapper, 1.75)
    assert model.config.longspan_alpha == 1.75
