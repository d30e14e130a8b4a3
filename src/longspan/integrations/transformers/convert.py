"""From a pretrained model of transformers to one with our attention and learned scales, ready to be fine-tuned.

A converted model is of a class and a config of its own, ``longspan_llama`` for a ``llama``, which the Auto classes
know: it is saved and loaded like any other. Its attention layers have everything they had, and under `longspan` a
scaler and a position.
"""

from copy import deepcopy
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3ForCausalLM

from longspan.integrations.transformers.attention import Parts
from longspan.integrations.transformers.cache import GeneratesWithoutCopies
from longspan.integrations.transformers.masks import check_model
from longspan.nn.positions import NAPE, NoPE, exponential_slopes
from longspan.nn.scalers import Adaptive, NoScale, Scalable, Scaler, SSMax

Method = Literal["softmax", "ssmax", "assmax", "entmax", "sentmax", "asentmax"]
Model = TypeVar("Model", bound=PreTrainedModel)

# A scale starts at delta + beta = 1 for every length, so that a converted model starts as the original.
_BETA = 0.05
_DELTA = 1 - _BETA

# The attention of every model that can be converted.
_LAYERS: dict[type[PreTrainedModel], type[nn.Module]] = {
    LlamaForCausalLM: LlamaAttention,
    Qwen2ForCausalLM: Qwen2Attention,
    Qwen3ForCausalLM: Qwen3Attention,
    MistralForCausalLM: MistralAttention,
    Gemma2ForCausalLM: Gemma2Attention,
}


def convert(
    model: Model,
    method: Method = "asentmax",
    position: Literal["nape", "keep"] = "nape",
    alpha: float = 1.0,
) -> Model:
    """Give a pretrained model our attention, in place; returns it.

    Args:
        model: a Llama, Qwen2, Qwen3, Mistral or Gemma 2 for causal language modelling.
        method: of `longspan.methods()`, whose scaler it gets; every scale starts at 1. Under a softmax method alpha
            belongs at 1.
        position: "nape" takes the rotations away and gives half of the heads ALiBi's slopes; "keep" keeps the
            rotations, and the model starts exactly as it was.
        alpha: to start with. 1 is softmax: raise it while the model is fine-tuned, see `set_alpha`.
    """
    made = _CONVERTED.get(type(model))
    if made is None:
        names = ", ".join(known.__name__ for known in _LAYERS)
        raise TypeError(f"cannot convert a {type(model).__name__}; what can be is {names}")
    _check(method, position)
    _check_alpha(alpha)
    if position == "nape" and model.config.num_attention_heads < 2:
        raise ValueError("NAPE needs at least 2 heads, one of each kind")
    config = _own_config(model)
    # In place, since whoever holds the model holds its layers.
    config.__class__ = made.config_class
    config.longspan_method, config.longspan_position = method, position
    model.__class__ = made
    _equip(model)
    model.set_attn_implementation("longspan")
    set_alpha(model, alpha)
    return model


def _own_config(model: PreTrainedModel) -> Any:
    """A copy of the config for this model and its layers: another model may have been built from the same."""
    shared, config = model.config, deepcopy(model.config)
    for part in model.modules():
        if getattr(part, "config", None) is shared:
            part.config = config
    return config


def _check(method: str, position: str) -> None:
    if method not in _SCALERS:
        raise ValueError(f"method must be one of {', '.join(_SCALERS)}, got {method!r}")
    if position not in ("nape", "keep"):
        raise ValueError(f"position must be 'nape' or 'keep', got {position!r}")


def _check_alpha(alpha: float) -> None:
    if not 1 <= alpha <= 64:
        raise ValueError(f"alpha must be between 1 and 64, got {alpha}")


def set_alpha(model: nn.Module, alpha: float) -> None:
    """Set alpha of every layer of a model of transformers that runs our attention; it is saved with the config.

    A compiled model compiles anew for every alpha: anneal in a few steps.
    """
    from longspan.integrations.transformers.model import LongspanForCausalLM
    from longspan.nn.normalizers import Entmax

    _check_alpha(alpha)
    ours = next((part for part in model.modules() if isinstance(part, LongspanForCausalLM)), None)
    if ours is not None:
        layers = [layer for layer in ours.modules() if isinstance(layer, Entmax)]
        if not layers or any(layer.logit is not None for layer in layers):
            raise ValueError("this model has no alpha to set: its attention is no entmax, or learns its alpha")
        for layer in layers:
            layer.fixed = float(alpha)
        ours.config.attention = {**ours.config.attention, "alpha": float(alpha)}
        return
    # By identity: a config has no hash.
    held = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    # Who wraps a model may have a config of another kind.
    configs = [config for config in held.values() if isinstance(config, PreTrainedConfig)]
    running = [config for config in configs if config._attn_implementation == "longspan"]
    if not running:
        raise ValueError('this model does not run our attention: load it with attn_implementation="longspan"')
    for config in running:
        check_model(type(config))
    for config in configs:
        config.longspan_alpha = float(alpha)


class _ConvertedConfig(PreTrainedConfig):
    """What a converted config says beyond the original's."""

    longspan_method: str = "asentmax"
    longspan_position: str = "nape"
    longspan_alpha: float = 1.0

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("attn_implementation", "longspan")
        super().__post_init__(**kwargs)
        _check(self.longspan_method, self.longspan_position)


class _Converted(GeneratesWithoutCopies, PreTrainedModel):
    """What a converted model does beyond the original."""

    _layer: ClassVar[type[nn.Module]]  # the class of its converted attention layers

    def __init__(self, config: _ConvertedConfig):
        super().__init__(config)
        _equip(self)

    def initialize_weights(self) -> None:
        """As the original, and our parts as they start in `_equip`, where they were not loaded."""
        super().initialize_weights()
        for layer in self.modules():
            if isinstance(layer, _ConvertedLayer):
                _start(layer.longspan, _parts(self.config))

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention not in (None, "longspan"):
            raise ValueError(f"a converted model runs 'longspan' attention, not {requested_attention!r}")
        return "longspan"


class _ConvertedLayer(nn.Module):
    """What a converted attention layer does beyond the original."""

    longspan: Parts
    config: PreTrainedConfig

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **kwargs: Any
    ) -> Any:
        if self.config.longspan_position == "nape" and position_embeddings is not None:
            cos, sin = position_embeddings
            position_embeddings = torch.ones_like(cos), torch.zeros_like(sin)  # a rotation by nothing
        return super().forward(
            hidden_states=hidden_states, position_embeddings=position_embeddings, layer_input=hidden_states, **kwargs
        )


def _adaptive(dim: int, heads: int) -> Scaler:
    return Adaptive(dim, heads, delta=_DELTA, initial_beta=_BETA)


def _scalable(dim: int, heads: int) -> Scaler:
    scaler = Scalable(dim, heads, delta=_DELTA)
    nn.init.constant_(scaler.beta, _BETA)
    nn.init.zeros_(scaler.gamma)
    return scaler


def _ssmax(dim: int, heads: int) -> Scaler:
    scaler = SSMax(dim, heads, delta=1.0)
    nn.init.zeros_(scaler.s)
    return scaler


_SCALERS = {
    "softmax": lambda dim, heads: NoScale(),
    "ssmax": _ssmax,
    "assmax": _adaptive,
    "entmax": lambda dim, heads: NoScale(),
    "sentmax": _scalable,
    "asentmax": _adaptive,
}


def _parts(config: PreTrainedConfig) -> Parts:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads  # not every family's config has it
    with torch.device("cpu"):  # with values, whatever the device that a model is being built on
        nape = config.longspan_position == "nape"
        position = NAPE(heads, head_dim, exponential_slopes) if nape else NoPE(heads, head_dim)
        return Parts(_SCALERS[config.longspan_method](config.hidden_size, heads), position)


def _equip(model: PreTrainedModel) -> None:
    """Turn every attention layer of a model that is of a converted class already into a converted one."""
    made = type(model)
    original = made._layer.__bases__[1]
    for layer in [layer for layer in model.modules() if type(layer) is original]:
        parts = _parts(model.config).to(layer.q_proj.weight.device)
        parts.scaler.to(model.dtype)  # slopes keep their digits
        layer.__class__ = made._layer
        layer.longspan = parts


@torch.no_grad()
def _start(parts: Parts, fresh: Parts) -> None:
    """Give what was not loaded its value; buffers never are."""
    device = parts.position.scaled.device
    parts.position = fresh.position.to(device)
    for name, parameter in parts.named_parameters():
        if not getattr(parameter, "_is_hf_initialized", False):
            parameter.copy_(fresh.get_parameter(name))


def _converted_class(original: type[PreTrainedModel], attention: type[nn.Module]) -> type[_Converted]:
    """The converted kind of a model, known to the Auto classes."""
    here = {"__module__": __name__}
    family = original.config_class.model_type
    config: Any = type(
        f"Longspan{original.config_class.__name__}",
        (_ConvertedConfig, original.config_class),
        {**here, "model_type": f"longspan_{family}"},
    )
    layer = type(f"Longspan{attention.__name__}", (_ConvertedLayer, attention), dict(here))
    made = type(
        f"Longspan{original.__name__}",
        (_Converted, original),
        {**here, "config_class": config, "_layer": layer, "__doc__": f"A converted `{original.__name__}`."},
    )
    AutoConfig.register(config.model_type, config)
    AutoModelForCausalLM.register(config, made)
    return made


_CONVERTED = {original: _converted_class(original, attention) for original, attention in _LAYERS.items()}
# Under their names in this module, which is where pickle looks for them.
globals().update(
    {kind.__name__: kind for made in _CONVERTED.values() for kind in (made, made.config_class, made._layer)}
)
