"""The cache of a layer: room, padding, reuse, the summary of its pages, and decoding through it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.functional import PageSummary, decode
from longspan.kernels.pages import MANY_KEYS, PAGE
from longspan.nn import Attention, KVCache, Softmax, build_attention
from longspan.nn.cache import extended

DIM, HEADS = 16, 4


def layer(method: str = "asentmax", position: str = "nape", **options: Any) -> Attention:
    """With weights large enough for attention to choose."""
    torch.manual_seed(0)
    attention = build_attention(method, DIM, HEADS, position=position, num_kv_heads=2, **options).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return attention.requires_grad_(False)


def inputs(time: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, time, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(time))


def keys(time: int, seed: int = 0) -> Tensor:
    return torch.randn(2, 3, time, 8, generator=torch.Generator().manual_seed(seed))


def test_nothing_is_copied_while_there_is_room() -> None:
    cache = KVCache(room=300)
    places = set()
    for time in (100, 1, 1, 150, 48):
        k, v, _ = cache.append(keys(time), keys(time, 1), None)
        places.add((k.data_ptr(), v.data_ptr()))
    assert len(places) == 1
    assert len(cache) == 300
    k, _, _ = cache.append(keys(1), keys(1), None)
    assert len(cache) == 301
    assert k.data_ptr() not in {place for place, _ in places}


def test_a_reset_cache_is_a_new_one_in_the_same_memory() -> None:
    attention, cache = layer(), KVCache(room=64)
    first = attention(inputs(30), cache=cache)
    where = cache.append(keys(0).double()[:, :2, :, :4], keys(0).double()[:, :2, :, :4], None)[0].data_ptr()
    cache.reset(64)
    assert len(cache) == 0
    assert cache.summary() is None
    torch.testing.assert_close(attention(inputs(30), cache=cache), first, rtol=0, atol=0)
    assert cache.append(keys(0).double()[:, :2, :, :4], keys(0).double()[:, :2, :, :4], None)[0].data_ptr() == where
    cache.reset()
    assert attention(inputs(5, batch=3), cache=cache).shape == (3, 5, DIM)  # another batch takes memory of its own


def test_memory_that_does_not_serve_again_is_left() -> None:
    cache = KVCache(room=9)
    with torch.inference_mode():  # which nobody may write to outside of it
        cache.append(keys(3), keys(3), None)
    k, _, _ = cache.append(keys(2), keys(2), None)
    assert torch.equal(k, torch.cat([keys(3), keys(2)], dim=2))
    cache.reset(9)
    narrow = keys(4)[..., :5]
    assert torch.equal(cache.append(narrow, narrow, None)[0], narrow)


@pytest.mark.parametrize(
    "times", [(200,), (1, 62, 1, 1, 63, 2, 70), (5, *[1] * 130)], ids=["whole", "pieces", "tokens"]
)
@pytest.mark.parametrize("room", [0, 200], ids=["growing", "reserved"])
def test_the_summary_bounds_every_page_however_the_keys_came(times: tuple[int, ...], room: int) -> None:
    cache = KVCache(room, boxes=True)
    for number, time in enumerate(times):
        k, _, _ = cache.append(keys(time, number), keys(time), None)
        summary = cache.summary()
        assert summary is not None
        norms = torch.nn.functional.pad(k.norm(dim=-1), (0, -k.shape[2] % PAGE)).unflatten(-1, (-1, PAGE)).amax(-1)
        torch.testing.assert_close(summary.norms, norms)
        pages = k.split(PAGE, dim=2)
        assert summary.low is not None
        assert summary.high is not None
        assert torch.equal(summary.low, torch.stack([page.amin(2) for page in pages], 2))
        assert torch.equal(summary.high, torch.stack([page.amax(2) for page in pages], 2))
    assert sum(times) == len(cache)


def test_the_summary_reads_new_keys_alone() -> None:
    cache = KVCache(room=200)
    k, _, _ = cache.append(keys(100), keys(100), None)
    before = cache.summary()
    assert before is not None
    expected = before.norms.clone()
    k.zero_()
    cache.append(keys(1) * 100, keys(1), None)
    after = cache.summary()
    assert after is not None
    assert torch.equal(after.norms[..., 0], expected[..., 0])
    assert (after.norms[..., 1] > expected[..., 1]).all()


@pytest.mark.parametrize("position", ["nape", "rope", "alibi"])
@pytest.mark.parametrize("method", ["asentmax", "softmax", "stick_breaking", "adaptive_temperature"])
def test_padding_on_the_left_changes_nothing(method: str, position: str) -> None:
    attention, x, starts = layer(method, position), inputs(40, batch=3), torch.tensor([0, 5, 17])
    expected = [attention(x[item : item + 1, start:])[0] for item, start in enumerate(starts.tolist())]
    cache = KVCache(starts=starts)
    found = torch.cat([attention(part, cache=cache) for part in x.split([20, 1, 1, 3, 15], dim=1)], dim=1)
    for item, start in enumerate(starts.tolist()):
        torch.testing.assert_close(found[item, start:], expected[item], rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", ["asentmax", "softmax", "topk"])
def test_steps_over_many_keys_are_those_of_one_pass(method: str) -> None:
    attention, x = layer(method), inputs(MANY_KEYS + 20, batch=1)
    cache = KVCache(room=MANY_KEYS + 20)
    attention(x[:, :MANY_KEYS], cache=cache)
    found = torch.cat([attention(part, cache=cache) for part in x[:, MANY_KEYS:].split([1, 16, 3], dim=1)], dim=1)
    torch.testing.assert_close(found, attention(x)[:, MANY_KEYS:], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("method", "boxes"), [("asentmax", True), ("softmax", False)])
def test_a_layer_decodes_by_the_kernels(method: str, boxes: bool, device: torch.device) -> None:
    pytest.importorskip("triton")
    exact, x, starts = layer(method), inputs(100), torch.tensor([30, 0])
    ours, outs = layer(method).float().to(device), []
    for attention, read in ((exact, x), (ours, x.float().to(device))):
        cache = KVCache(starts=starts.to(read.device), boxes=boxes)
        attention(read[:, :97], cache=cache)
        attention.impl = "triton" if attention is ours else "auto"
        outs.append(torch.cat([attention(part, cache=cache) for part in read[:, 97:].split([1, 2], dim=1)], dim=1))
    torch.testing.assert_close(outs[1].double().cpu(), outs[0], rtol=0, atol=2e-5)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        KVCache(room=-1)
    with pytest.raises(ValueError, match="integers"):
        KVCache(starts=torch.ones(2))
    with pytest.raises(ValueError, match="integers"):
        KVCache(starts=torch.tensor([True, False]))
    with pytest.raises(ValueError, match="3 starts"):
        KVCache(starts=torch.tensor([0, 1, 2])).append(keys(4), keys(4), None)
    with pytest.raises(ValueError, match="no document ids"):
        KVCache(starts=torch.tensor([0, 1])).append(keys(4), keys(4), torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.parametrize("learnt", ["query", "scaler"])
@pytest.mark.parametrize("last_with_gradients", [True, False])
def test_what_a_backward_asks_for_is_not_written_over(learnt: str, last_with_gradients: bool) -> None:
    """Keys and values have no gradients, but those of the queries need them as they were."""
    attention, x = layer(), inputs(8)
    attention.get_submodule(learnt).requires_grad_(True)
    cache = KVCache(room=64)
    with torch.no_grad():
        attention(x[:, :2], cache=cache)
    early = attention(x[:, 2:5], cache=cache).sum()
    with torch.set_grad_enabled(last_with_gradients):
        late = attention(x[:, 5:], cache=cache).sum()
    (early + late).backward()
    found = [parameter.grad for parameter in attention.parameters()]
    attention.zero_grad()
    attention(x)[:, 2 : 8 if last_with_gradients else 5].sum().backward()
    for mine, parameter in zip(found, attention.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)


def test_memory_that_a_backward_asks_for_is_left_by_a_reset() -> None:
    cache = KVCache(room=9)
    held = cache.append(keys(3), keys(3), None, held=True)[0]
    cache.reset(9)
    cache.append(keys(3, 1), keys(3, 1), None)
    assert torch.equal(held, keys(3))


def test_a_scale_learns_from_decoding_steps_too() -> None:
    attention, cache = layer(), KVCache(starts=torch.tensor([0, 3]))
    attention.scaler.requires_grad_(True)
    attention(inputs(8), cache=cache)
    assert attention(inputs(1), cache=cache).requires_grad


REFUSED: dict[str, tuple[Tensor, Tensor, Tensor | None, str]] = {
    "fewer_heads": (keys(2)[:, :1], keys(2)[:, :1], None, "with 1 heads of 8"),
    "wider_values": (keys(2), keys(2).repeat(1, 1, 1, 2), None, "with 3 heads of 16"),
    "another_batch": (keys(2)[:1], keys(2)[:1], None, "a batch of 1"),
    "another_dtype": (keys(2).half(), keys(2).half(), None, "torch.float16"),
    "ids_of_other_tokens": (keys(2), keys(2), torch.zeros(2, 3, dtype=torch.long), r"integer ids of shape \(2, 2\)"),
    "fractional_ids": (keys(2), keys(2), torch.zeros(2, 2), "integer ids"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tokens_that_are_refused_leave_no_trace(name: str) -> None:
    k, v, documents, message = REFUSED[name]
    ids, cache = torch.zeros(2, 4, dtype=torch.long), KVCache(room=9)
    cache.append(keys(4), keys(4), ids)
    with pytest.raises(ValueError, match=message):
        cache.append(k, v, documents)
    assert len(cache) == 4
    after, _, documents = cache.append(keys(2, 1), keys(2, 1), ids[:, :2])
    assert torch.equal(after, torch.cat([keys(4), keys(2, 1)], dim=2))
    assert documents is not None
    assert documents.shape == (2, 6)


def test_a_summary_of_keys_in_float64() -> None:
    cache = KVCache()
    k, _, _ = cache.append(keys(5).double(), keys(5).double(), None)
    summary = cache.summary()
    assert summary is not None
    assert torch.equal(summary.norms[..., 0], k.norm(dim=-1).amax(-1).float())


def test_memory_grows_in_a_compiled_step() -> None:
    memory = torch.zeros(1, 1, 8, 2)
    added = torch.compile(extended, backend="eager", fullgraph=True)(memory, 3, torch.ones(1, 1, 2, 2), 8)
    assert added[0, 0, :, 0].tolist() == [0, 0, 0, 1, 1, 0, 0, 0]


def test_room_doubles_where_nobody_knew_how_much_it_takes() -> None:
    cache = KVCache()
    sizes = {cache.append(keys(1), keys(1), None)[0].untyped_storage().nbytes() for _ in range(100)}
    assert len(sizes) == 8  # 1, 2, 4 ... 128 tokens


def test_padding_has_position_0() -> None:
    cache = KVCache(starts=torch.tensor([0, 3]))
    assert cache.own_positions(5, torch.device("cpu")).tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 0, 1]]


def test_a_reset_cache_serves_a_model_of_another_precision() -> None:
    cache = KVCache()
    cache.append(keys(5).half(), keys(5).half(), None)
    cache.reset()
    k, v, _ = cache.append(keys(3), keys(3, 1), None)
    assert torch.equal(k, keys(3))
    assert torch.equal(v, keys(3, 1))


class Dense(Softmax):
    """It does not say that it is an entmax, so its scores are made and it is called with them."""

    def entmax_form(self) -> None:  # type: ignore[override]
        return None


def test_a_temperature_divides_every_score_in_a_pass_and_in_steps() -> None:
    expected = layer("softmax", "alibi", normalizer=Dense(0.3))(inputs(40))
    attention = layer("softmax", "alibi", normalizer=Softmax(0.3))
    torch.testing.assert_close(attention(inputs(40)), expected, rtol=0, atol=1e-10)
    cache = KVCache(starts=torch.tensor([0, 0]))
    found = torch.cat([attention(part, cache=cache) for part in inputs(40).split([37, 1, 2], dim=1)], dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("position", "boxes", "summarised"),
    [("rope", False, False), ("rope", True, True), ("nape", False, True)],
    ids=["nothing", "boxes", "slopes"],
)
def test_pages_are_summarised_where_that_may_leave_some_unread(
    position: str, boxes: bool, summarised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def spy(*inputs: Tensor, summary: PageSummary | None, **options: Any) -> Tensor:
        given.append(summary is not None)
        return decode(*inputs, **options)

    monkeypatch.setattr("longspan.nn.attention.kernels_cannot", lambda q, v: None)
    monkeypatch.setattr("longspan.nn.attention.decode", spy)
    layer("entmax", position).float()(inputs(3).float(), cache=KVCache(starts=torch.tensor([0, 1]), boxes=boxes))
    assert given == [summarised]
