"""Runs of ours to the hub's format and back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from longspan.integrations.transformers.config import LongspanConfig
from longspan.integrations.transformers.model import LongspanForCausalLM
from longspan.text.corpora import open_corpus
from longspan.text.documents import CorpusError
from longspan.text.tokenizer import Tokenizer
from longspan.train import checkpoint as checkpoints
from longspan.train.checkpoint import Checkpoint, CheckpointError
from longspan.train.config import RunConfig, from_json, to_json
from longspan.train.lm import LanguageConfig, language_model_of
from longspan.train.trainer import model_of


def export_run(run: Path, out: Path, which: Literal["best", "last"] = "best") -> CorpusError | None:
    """Write the model of a run, and a language model's tokenizer, for `from_pretrained` to read.

    Returns why there is no tokenizer, where a language model's corpus is gone.
    """
    loaded = checkpoints.load(checkpoints.of_run(run, which))
    origin = {"step": loaded.step, "config": loaded.config}
    if "task" in loaded.config:
        model, config = model_of(loaded)
        hub = LongspanConfig.of(model.config, "decoder", run=origin, max_position_embeddings=config.longest)
        _saved(hub, model.state_dict(), out)
        return None
    llama, language = language_model_of(loaded)
    missing: CorpusError | None = None
    marks = {}
    try:
        tokenizer = open_corpus(Path(language.corpus)).tokenizer
    except CorpusError as error:
        missing = error
    else:
        marks = {"bos_token_id": tokenizer.begin, "eos_token_id": tokenizer.end, "pad_token_id": tokenizer.end}
    hub = LongspanConfig.of(llama.config, "llama", run=origin, max_position_embeddings=language.context, **marks)
    _saved(hub, llama.state_dict(), out)
    if missing is None:
        hub_tokenizer(tokenizer).save_pretrained(out)
    return missing


def import_run(source: Path, run: Path) -> Path:
    """Write a model that was exported from a run, and perhaps trained on, as a run with one checkpoint.

    It can be measured like any other; it holds no state of an optimiser, so training cannot go on from it.
    """
    if checkpoints.saved(run / "checkpoints"):
        raise CheckpointError(f"{run} has checkpoints already; choose another folder")
    if not (source / "config.json").is_file():
        raise CheckpointError(f"{source} holds no model: there is no config.json")
    hub = LongspanConfig.from_pretrained(source)
    if hub.run is None:
        raise CheckpointError(f"{source} was not exported from a run: its config does not say how it was trained")
    model = LongspanForCausalLM.from_pretrained(source)
    kind: type[RunConfig] | type[LanguageConfig] = RunConfig if "task" in hub.run["config"] else LanguageConfig
    config = replace(from_json(kind, hub.run["config"]), model=hub.sizes())
    # What was exported is what the run is measured by: its averaged weights, where it has any.
    prefix = "average" if getattr(config, "average", None) is not None else "model"
    tensors = {f"{prefix}.{name}": tensor for name, tensor in model.decoder.state_dict().items()}
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.json").write_text(json.dumps(to_json(config), indent=2))
    return checkpoints.save(run / "checkpoints", Checkpoint(hub.run["step"], to_json(config), tensors))


def hub_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Our tokenizer as transformers' own; it begins every text with its mark, as in training."""
    from tokenizers.processors import TemplateProcessing

    begin, end = (tokenizer.backend.id_to_token(mark) for mark in (tokenizer.begin, tokenizer.end))
    backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
    if backend.post_processor is None:
        backend.post_processor = TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, tokenizer.begin)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=begin, eos_token=end, pad_token=end)


def _saved(config: LongspanConfig, weights: dict[str, Tensor], out: Path) -> None:
    model = LongspanForCausalLM(config)
    model.decoder.load_state_dict(weights)
    model.save_pretrained(out)
