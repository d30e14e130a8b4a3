"""`LongspanForCausalLM`: our decoders in the hub's format are our decoders, and do what transformers' own models do."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import invoke, succeed
from tiny_runs import TINY, train
from tiny_transformers import VOCABULARY, gradients, greedy, padded, sharpened, tiny, tokens
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    StaticCache,
    Trainer,
    TrainerState,
    TrainingArguments,
    pipeline,
)

from longspan.integrations.transformers import AnnealAlpha, LongspanConfig, LongspanForCausalLM, annealed, set_alpha
from longspan.integrations.transformers.config import STYLES
from longspan.nn.decoder import AttentionConfig, Decoder, DecoderConfig
from longspan.nn.generate import generate
from longspan.nn.llama import Llama
from longspan.nn.methods import METHODS
from longspan.train import checkpoint as checkpoints
from longspan.train.lm import language_model_of
from longspan.train.trainer import model_of


def sizes(method: str = "asentmax", position: str = "nape", **options: Any) -> DecoderConfig:
    return DecoderConfig(VOCABULARY, 2, 32, 48, 4, AttentionConfig(method=method, position=position, **options))


def pair(style: str, config: DecoderConfig) -> tuple[Decoder | Llama, Any]:
    """A decoder of ours and the hub's model with its weights, in float64."""
    torch.manual_seed(0)
    ours = sharpened(STYLES[style](config))
    hub = LongspanForCausalLM(LongspanConfig.of(config, style)).double().eval()
    hub.decoder.load_state_dict(ours.state_dict())
    return ours, hub


CASES = [("llama", method, METHODS[method].position) for method in METHODS]
CASES += [("decoder", "asentmax", "nape"), ("decoder", "entmax", "rope"), ("llama", "asentmax", "rope")]


@pytest.mark.parametrize(("style", "method", "position"), CASES)
def test_the_hubs_model_is_ours(style: str, method: str, position: str) -> None:
    ours, hub = pair(style, sizes(method, position, top_k=3))
    rows = [tokens(1, time, seed=time)[0] for time in (11, 7)]
    with torch.no_grad():
        assert torch.allclose(hub(rows[0][None]).logits, ours(rows[0][None]), atol=1e-9)
        for side in ("left", "right"):
            ids, mask = padded(rows, side)
            together = hub(ids, attention_mask=mask).logits
            for number, row in enumerate(rows):
                assert torch.allclose(together[number][mask[number].bool()], ours(row[None])[0], atol=1e-9)
        positions = torch.cat([torch.arange(11), torch.arange(7)])[None]
        packed = hub(torch.cat(rows)[None], position_ids=positions, use_cache=False).logits[0]
        assert torch.allclose(packed, torch.cat([ours(row[None])[0] for row in rows]), atol=1e-9)


@pytest.mark.parametrize("style", STYLES)
def test_rotations_are_those_of_the_position_ids(style: str) -> None:
    """A conversation goes on behind the padding of its first answer, and its positions do not count that."""
    ours, hub = pair(style, sizes(position="rope"))
    row = tokens(1, 9)
    ids, mask = torch.zeros(1, 13, dtype=torch.long), torch.tensor([[0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1]])
    ids[mask.bool()] = row[0]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        found = hub(ids, attention_mask=mask, position_ids=positions).logits
        assert torch.allclose(found[mask.bool()], ours(row)[0], atol=1e-9)
    assert torch.equal(greedy(hub, ids, attention_mask=mask)[0], generate(ours, row, 10)[0, 9:])


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 4}])
@pytest.mark.parametrize(("style", "method", "position"), CASES)
def test_it_generates_what_ours_does(style: str, method: str, position: str, options: dict[str, Any]) -> None:
    ours, hub = pair(style, sizes(method, position, top_k=3))
    rows = [tokens(1, time, seed=time)[0] for time in (9, 5)]
    ids, mask = padded(rows, "left")
    found = greedy(hub, ids, attention_mask=mask, **options)
    for number, row in enumerate(rows):
        assert torch.equal(generate(ours, row[None], 10)[0, len(row) :], found[number])


@pytest.mark.parametrize(("style", "position"), [("decoder", "nape"), ("llama", "rope")])
def test_saved_and_loaded_it_is_the_same(style: str, position: str, tmp_path: Path) -> None:
    hub = pair(style, sizes(position=position, slopes="exponential"))[1].float()
    hub.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(back, LongspanForCausalLM)
    ids = tokens(2, 9)
    assert torch.equal(back(ids).logits, hub(ids).logits)
    names = {name for name, _ in back.named_parameters() if ".scaler." in name}
    assert len(names) == 8  # two projections and their biases in each of two layers
    assert AutoConfig.from_pretrained(tmp_path).sizes() == hub.config.sizes()


def test_it_starts_as_ours_and_keeps_digits_that_half_precision_has_not(tmp_path: Path) -> None:
    torch.manual_seed(3)
    ours = Llama(sizes(position="alibi"))
    torch.manual_seed(3)
    hub = AutoModelForCausalLM.from_config(LongspanConfig.of(sizes(position="alibi"), "llama"))
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in hub.decoder.state_dict().items())
    hub.save_pretrained(tmp_path)
    half = LongspanForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.decoder.output.weight.dtype == torch.bfloat16
    slopes = "blocks.0.attention.position.slopes"
    assert torch.equal(half.decoder.get_buffer(slopes), ours.get_buffer(slopes))  # 1/3 is no bfloat16


def test_what_a_checkpoint_lacks_starts_as_in_a_new_model(tmp_path: Path) -> None:
    hub = LongspanForCausalLM(LongspanConfig.of(sizes("entmax"), "llama"))
    hub.save_pretrained(tmp_path)
    config = LongspanConfig.of(sizes("asentmax"), "llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.modeling_utils.logger.warning", lambda *args: None)
        scaled = LongspanForCausalLM.from_pretrained(tmp_path, config=config)
    for name, parameter in scaled.named_parameters():
        if name.endswith("scaler.beta.bias"):
            assert torch.allclose(torch.nn.functional.softplus(parameter), torch.tensor(0.05))
        elif ".scaler." in name:
            assert not parameter.any()
        else:
            assert torch.equal(parameter, hub.get_parameter(name))


def test_loss_states_and_maps_are_transformers() -> None:
    ours, hub = pair("llama", sizes())
    ids = tokens(2, 9)
    output = hub(ids, labels=ids, output_hidden_states=True, output_attentions=True)
    shifted = torch.nn.functional.cross_entropy(ours(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    assert torch.allclose(output.loss.float(), shifted, atol=1e-6)
    assert len(output.hidden_states) == 3
    assert torch.allclose(hub.decoder.output(output.hidden_states[-1]), output.logits)
    assert [tuple(weights.shape) for weights in output.attentions] == [(2, 4, 9, 9)] * 2
    assert torch.allclose(output.attentions[0].sum(-1), torch.ones(2, 4, 9, dtype=torch.float64))
    assert torch.allclose(hub(ids, logits_to_keep=1).logits, output.logits[:, -1:])
    assert torch.equal(hub(inputs_embeds=hub.get_input_embeddings()(ids)).logits, output.logits)
    assert torch.equal(hub(ids, return_dict=False)[0], output.logits)
    hub.config.output_hidden_states = True
    assert len(hub(ids).hidden_states) == 3
    assert hub(ids, output_hidden_states=False).hidden_states is None


def test_maps_come_back_from_layers_on_several_devices() -> None:
    """Accelerate hands such layers copies of what they are given, on their own device."""
    hooks = pytest.importorskip("accelerate.hooks")
    hub = pair("llama", sizes(position="rope"))[1]
    ids, mask = padded([tokens(1, 9)[0], tokens(1, 5)[0]], "left")
    expected = hub(ids, attention_mask=mask, output_attentions=True)
    for block in hub.decoder.blocks:
        hook = hooks.AlignDevicesHook(
            "cpu", io_same_device=False, place_submodules=True, skip_keys=hub._skip_keys_device_placement
        )
        hooks.add_hook_to_module(block, hook)
    found = hub(ids, attention_mask=mask, output_attentions=True)
    assert torch.equal(found.logits, expected.logits)
    for one, other in zip(found.attentions, expected.attentions, strict=True):
        assert torch.equal(one, other)


def test_a_static_cache_takes_several_tokens_at_a_time() -> None:
    hub = pair("llama", sizes())[1]
    ids = tokens(2, 12)
    cache = StaticCache(config=hub.config, max_cache_len=20)
    with torch.no_grad():
        pieces = [hub(part, past_key_values=cache).logits for part in ids.split([5, 4, 1, 2], dim=1)]
        assert torch.allclose(torch.cat(pieces, 1), hub(ids, use_cache=False).logits, atol=1e-9)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    hub = pair("decoder", sizes())[1].train()
    ids = tokens(2, 9)
    hub(ids, labels=ids).loss.backward()
    expected = gradients(hub)
    hub.gradient_checkpointing_enable()
    hub(ids, labels=ids).loss.backward()
    assert expected
    assert all(torch.allclose(grad, expected[name], atol=1e-9) for name, grad in gradients(hub).items())


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # by dynamo itself
def test_compiled_it_decodes_into_a_static_cache_by_one_graph() -> None:
    hub = pair("llama", sizes())[1]
    ids = tokens(2, 6)
    expected = greedy(hub, ids, most=6)
    hub.forward = torch.compile(hub.forward, backend="eager", fullgraph=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch.equal(greedy(hub, ids, most=6, cache_implementation="static"), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 2  # the prompt, and every step
    torch._dynamo.reset()


def test_more_tokens_can_be_added() -> None:
    hub = pair("llama", sizes())[1]
    ids = tokens(1, 5)
    before = hub(ids).logits
    hub.resize_token_embeddings(VOCABULARY + 3)
    assert hub.config.sizes().vocabulary == VOCABULARY + 3
    assert torch.allclose(hub(ids).logits[..., :VOCABULARY], before)


class Copies(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences said twice."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = tokens(1, 6, seed=number)[0].repeat(2)
        return {"input_ids": ids, "labels": ids}


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_trainer_trains_it_and_anneals_alpha(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    hub = LongspanForCausalLM(LongspanConfig.of(sizes(), "llama"))
    scale = hub.decoder.get_parameter("blocks.0.attention.scaler.beta.weight")
    assert not scale.any()
    told = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=30,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=10,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(hub, told, train_dataset=Copies(), callbacks=[AnnealAlpha(end=1.75)])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.2
    assert scale.any()
    trainer.save_model(str(tmp_path / "saved"))
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert back.config.attention["alpha"] == 1.75
    ids = tokens(1, 9)
    assert torch.equal(back(ids).logits, hub.eval()(ids).logits)


@pytest.mark.parametrize("kind", ["ours", "llama"])
def test_the_collator_that_packs_documents_keeps_them_apart(kind: str) -> None:
    model = pair("llama", sizes())[1] if kind == "ours" else tiny("llama", use_cache=False)  # as Trainer sets it
    rows = [tokens(1, time, seed=time)[0] for time in (9, 6)]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")
    batch = collator([{"input_ids": row.tolist()} for row in rows])
    model.train()
    packed = model(**batch).loss
    alone = [model(row[None], labels=row[None]).loss * (len(row) - 1) for row in rows]
    assert torch.allclose(packed, sum(alone) / 13, atol=1e-6)


def test_annealing_goes_from_start_to_end() -> None:
    assert [annealed(at, stages=5) for at in (0, 0.09, 0.1, 0.5, 1)] == [1.0, 1.0, 1.1, 1.5, 1.5]
    assert annealed(0, share=0) == 1.5
    model = tiny("llama")
    for steps, ends in ((3, [1.0, 1.5]), (1, [1.5, 1.5])):  # the one step of a training is its last
        anneal, found = AnnealAlpha(), []
        for step in (0, steps - 1):
            anneal.on_step_begin(None, TrainerState(global_step=step, max_steps=steps), None, model)
            found.append(model.config.longspan_alpha)
        assert found == ends
    with pytest.raises(ValueError, match="between 1 and 64"):
        AnnealAlpha(start=0)
    with pytest.raises(ValueError, match="share must be between 0 and 1"):
        AnnealAlpha(share=2)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a run of either kind, and both exported; the commands run in it."""
    from tiny_text import write_texts

    folder = tmp_path_factory.mktemp("hub")
    train(replace(TINY, steps=12), folder / "synthetic")
    write_texts(folder / "texts", [60] * 40 + [400] * 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "200")
        succeed("lm", "corpus", "corpus", "--folder=texts", "--vocabulary=300", "--validation=0.2")
        small = ["--steps=4", "--context=32", "--set=batch=4", "--set=model.layers=1", "--device=cpu"]
        succeed("lm", "train", "corpus", *small, "--out=language")
        for run in ("synthetic", "language"):
            assert "written:" in succeed("export", run, f"{run}-hub")
        yield folder


@pytest.mark.parametrize("run", ["synthetic", "language"])
def test_a_run_goes_to_the_hub_and_comes_back(exported: Path, run: str) -> None:
    hub = AutoModelForCausalLM.from_pretrained(exported / f"{run}-hub")
    load: Any = model_of if run == "synthetic" else language_model_of
    ours, config = load(checkpoints.load(checkpoints.of_run(exported / run)))
    ids = torch.randint(config.model.vocabulary, (2, 20), generator=torch.Generator().manual_seed(0))
    assert torch.equal(hub(ids).logits, ours(ids))
    succeed("import", f"{run}-hub", f"{run}-again")
    again, same = load(checkpoints.load(checkpoints.of_run(exported / f"{run}-again")))
    assert same == config
    assert torch.equal(again(ids), ours(ids))
    assert (
        json.loads((exported / f"{run}-again/config.json").read_text())["model"]
        == json.loads((exported / run / "config.json").read_text())["model"]
    )
    with pytest.raises(checkpoints.CheckpointError, match="has checkpoints already"):
        invoke("import", f"{run}-hub", f"{run}-again")


def test_an_imported_run_is_measured_like_any_other(exported: Path) -> None:
    succeed("import", "language-hub", "measured")
    assert "perplexity" in succeed("lm", "perplexity", "measured", "--length=32", "--device=cpu")


def test_a_trained_on_model_comes_back_as_it_is_now(exported: Path, tmp_path: Path) -> None:
    hub = LongspanForCausalLM.from_pretrained(exported / "language-hub")
    set_alpha(hub, 2.0)
    hub.save_pretrained(tmp_path / "hub")
    succeed("import", str(tmp_path / "hub"), str(tmp_path / "run"))
    ours, config = language_model_of(checkpoints.load(checkpoints.of_run(tmp_path / "run")))
    assert config.model.attention.alpha == 2.0
    ids = torch.randint(300, (1, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours(ids), hub(ids).logits)


def test_a_language_model_brings_its_tokenizer_and_runs_in_a_pipeline(exported: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported / "language-hub")
    ids = tokenizer("the old river")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the old river"
    write = pipeline("text-generation", model=str(exported / "language-hub"), device="cpu")
    texts = write(["the old river", "light"], max_new_tokens=5, do_sample=False, batch_size=2)
    assert texts[0][0]["generated_text"].startswith("the old river")
    alone = write("light", max_new_tokens=5, do_sample=False)
    assert texts[1][0]["generated_text"] == alone[0]["generated_text"]


def test_a_run_whose_corpus_is_gone_is_exported_without_a_tokenizer(exported: Path) -> None:
    (exported / "corpus").rename(exported / "elsewhere")
    try:
        assert "without a tokenizer" in succeed("export", "language", "bare")
    finally:
        (exported / "elsewhere").rename(exported / "corpus")
    assert not (exported / "bare/tokenizer.json").exists()
    assert AutoConfig.from_pretrained(exported / "bare").model_type == "longspan"


def test_lm_eval_reads_it(exported: Path) -> None:
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    hub = AutoModelForCausalLM.from_pretrained(exported / "language-hub")
    tokenizer = AutoTokenizer.from_pretrained(exported / "language-hub")
    harness = huggingface.HFLM(pretrained=hub, tokenizer=tokenizer, batch_size=2, device="cpu", add_bos_token=True)
    assert harness.max_length == 32  # the context of the run
    asked = [("the old river", " sings"), ("light", " of stone and light")]
    requests = [instance("loglikelihood", {}, arguments, 0) for arguments in asked]
    for (start, end), (found, _) in zip(asked, harness.loglikelihood(requests), strict=True):
        before, whole = (tokenizer(text)["input_ids"] for text in (start, start + end))
        with torch.no_grad():
            odds = hub(torch.tensor([whole])).logits[0].log_softmax(-1)
        expected = sum(odds[at - 1, whole[at]].item() for at in range(len(before), len(whole)))
        assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("command", ["export", "import"])
def test_without_transformers_the_commands_say_what_they_need(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("longspan.integrations.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = invoke(command, str(tmp_path), "out")
    assert result.exit_code == 2
    assert "needs transformers: pip install 'longspan[transformers]'" in " ".join(result.output.split())


def test_what_is_wrong_is_said(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="style must be one of decoder, llama"):
        LongspanConfig(style="gpt")
    with pytest.raises(ValueError, match="unknown fields colour"):
        LongspanConfig(attention={"colour": 3})
    with pytest.raises(ValueError, match="tie_word_embeddings must be False"):
        LongspanConfig(tie_word_embeddings=True)
    with pytest.raises(ValueError, match="has its own attention, 'longspan', not 'sdpa'"):
        AutoModelForCausalLM.from_config(LongspanConfig(), attn_implementation="sdpa")
    hub = LongspanForCausalLM(LongspanConfig.of(sizes("softmax"), "llama"))
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        hub()
    with pytest.raises(ValueError, match="no alpha to set"):
        set_alpha(hub, 1.5)
    hub.save_pretrained(tmp_path / "hub")
    with pytest.raises(checkpoints.CheckpointError, match="was not exported from a run"):
        invoke("import", str(tmp_path / "hub"), str(tmp_path / "run"))
    with pytest.raises(checkpoints.CheckpointError, match="holds no model"):
        invoke("import", str(tmp_path / "nothing"), str(tmp_path / "run"))
    with pytest.raises(checkpoints.CheckpointError, match="has no checkpoint"):
        invoke("export", str(tmp_path), str(tmp_path / "out"))
