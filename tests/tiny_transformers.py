"""Tiny models of transformers with random weights, for the tests of the integration."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

import longspan.integrations.transformers  # noqa: F401  (registers the attention)

VOCABULARY = 50
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,  # so that nothing ends early
}
WINDOW = 6  # of the sliding layers: every other one of Gemma 2's, all of Mistral's


def config_of(family: str, **changes: Any) -> PreTrainedConfig:
    if family == "llama":
        return LlamaConfig(**_SIZES | changes)
    if family == "qwen2":
        return Qwen2Config(**_SIZES | changes)
    if family == "qwen3":
        return Qwen3Config(**_SIZES | changes)
    if family == "mistral":
        return MistralConfig(**_SIZES | {"sliding_window": WINDOW} | changes)
    own = {"sliding_window": WINDOW, "attn_logit_softcapping": None, "query_pre_attn_scalar": 8}
    return Gemma2Config(**_SIZES | own | changes)


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2")


def tiny(family: str, attention: str = "longspan", **changes: Any) -> PreTrainedModel:
    """A model of a family, in float64 and with weights large enough for attention to choose."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family, **changes), attn_implementation=attention)
    return sharpened(model)


def sharpened(model: Any) -> Any:
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tokens(batch: int, time: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(seed))


def padded(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Rows of any lengths as a batch, and its mask."""
    longest = max(len(row) for row in rows)
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(longest - len(row), None) if side == "left" else slice(0, len(row))
        ids[number, place], mask[number, place] = row, 1
    return ids, mask


def greedy(model: Any, ids: Tensor, most: int = 10, **options: Any) -> Tensor:
    """The new tokens."""
    given = {"max_new_tokens": most, "do_sample": False, "pad_token_id": 0, "disable_compile": True} | options
    return model.generate(ids, **given)[:, ids.shape[1] :]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found
