"""`GrowingCache`: a dynamic cache of transformers that does not copy what it holds with every token."""

import copy
from typing import Any

import pytest
import torch
from test_transformers_convert import converted
from test_transformers_models import pair, sizes
from tiny_transformers import greedy, padded, tiny, tokens
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from longspan.integrations.transformers import GrowingCache
from longspan.integrations.transformers.cache import GrowingLayer

MODELS: dict[str, Any] = {
    "llama": lambda: tiny("llama"),
    "gemma2": lambda: tiny("gemma2"),
    "converted": lambda: converted("qwen3"),
    "ours": lambda: pair("llama", sizes())[1],
}


def states(time: int, seed: int = 0, batch: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + time)
    return torch.randn(batch, 3, time, 4, generator=generator), torch.randn(batch, 3, time, 5, generator=generator)


def place(cache: Any) -> tuple[int, int]:
    return cache.layers[0].keys.data_ptr(), cache.layers[0].values.data_ptr()


def test_nothing_is_copied_while_there_is_room() -> None:
    cache, places = GrowingCache(room=40), set()
    for time in (30, *[1] * 10):
        k, v = cache.update(*states(time), 0)
        places.add((k.data_ptr(), v.data_ptr()))
    assert len(places) == 1
    cache.update(*states(1), 0)
    assert place(cache) not in places
    assert cache.get_seq_length() == 41
    assert cache.layers[0].keys.shape[2] == 41
    moves = set()
    for _ in range(160):
        cache.update(*states(1), 0)
        moves.add(place(cache))
    assert len(moves) == 3  # room for 80, 160 and 320


@pytest.mark.parametrize("room", [0, 12])
def test_it_holds_what_a_dynamic_cache_does(room: int) -> None:
    """Through all that transformers does to a cache."""
    ours, theirs = GrowingCache(room=room), DynamicCache()
    steps = [
        lambda cache: cache.update(*states(5), 0),
        lambda cache: cache.update(*states(1), 0),
        lambda cache: cache.crop(-2),
        lambda cache: cache.update(*states(3, seed=1), 0),
        lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
        lambda cache: cache.update(*states(1, seed=2), 0),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.update(*states(2, seed=3, batch=4), 0),
        lambda cache: cache.batch_select_indices(torch.tensor([0, 3])),
        lambda cache: cache.update(*(part.double() for part in states(1, seed=4)), 0),
        lambda cache: cache.update(*states(1, seed=5), 0),
        lambda cache: cache.crop(-cache.get_seq_length()),
        lambda cache: cache.update(*states(4, seed=6), 0),
    ]
    for step in steps:
        for cache in (ours, theirs):
            step(cache)
        assert torch.equal(ours.layers[0].keys, theirs.layers[0].keys)
        assert torch.equal(ours.layers[0].values, theirs.layers[0].values)
        assert ours.get_seq_length() == theirs.get_seq_length()


def test_a_copy_has_memory_of_its_own() -> None:
    cache = GrowingCache(room=9)
    cache.update(*states(3), 0)
    other = copy.deepcopy(cache)
    cache.update(*states(2, seed=1), 0)
    other.update(*states(2, seed=2), 0)
    assert torch.equal(cache.layers[0].keys[:, :, 3:], states(2, seed=1)[0])
    assert torch.equal(other.layers[0].keys[:, :, 3:], states(2, seed=2)[0])


def test_memory_of_inference_mode_is_not_written_to_outside_of_it() -> None:
    cache = GrowingCache(room=9)
    with torch.inference_mode():
        cache.update(*states(3), 0)
    cache.update(*states(2), 0)
    assert torch.equal(cache.layers[0].keys, torch.cat([states(3)[0], states(2)[0]], dim=2))


def test_gradients_go_through_it() -> None:
    model = tiny("llama")
    ids = tokens(2, 9)

    def gradient(cache: Any) -> Tensor:
        pieces = [model(part, past_key_values=cache).logits for part in ids.split([5, 1, 3], dim=1)]
        return torch.autograd.grad(torch.cat(pieces, 1).square().sum(), model.model.embed_tokens.weight)[0]

    assert torch.allclose(gradient(GrowingCache(config=model.config, room=20)), gradient(DynamicCache()), atol=1e-9)


def test_layers_with_a_window_keep_their_own_kind() -> None:
    kinds = [type(layer) for layer in GrowingCache(config=tiny("gemma2").config).layers]
    assert [kind is DynamicSlidingWindowLayer for kind in kinds] == [True, False]


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prefill_chunk_size": 4}, {"do_sample": True}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_generation_over_it_is_generation_without(name: str, options: dict[str, Any]) -> None:
    model = MODELS[name]()
    ids, mask = padded([tokens(1, time, seed=time)[0] for time in (9, 5)], "left")
    found = []
    for given in ({"use_cache": False}, {"past_key_values": GrowingCache(config=model.config, room=12)}):
        torch.manual_seed(0)
        asked = {key: value for key, value in options.items() if "past_key_values" in given or key[:7] != "prefill"}
        found.append(greedy(model, ids, attention_mask=mask, **asked, **given))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["converted", "ours"])
def test_our_models_generate_over_it(name: str) -> None:
    model = MODELS[name]()
    ids = tokens(1, 9)
    told = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(ids, use_cache=False, **told).sequences
    made = model.generate(ids, **told)
    assert torch.equal(made.sequences, expected)
    assert all(isinstance(layer, GrowingLayer) for layer in made.past_key_values.layers)
    chosen = DynamicCache(config=model.config)
    assert model.generate(ids, past_key_values=chosen, **told).past_key_values is chosen
    looked_up = model.generate(ids, prompt_lookup_num_tokens=3, max_new_tokens=6, do_sample=False)
    assert torch.equal(looked_up, expected)
