"""Our own decoders as a model of transformers: its caches, `generate`, `Trainer`, `pipeline`, the hub's format."""

from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from longspan.integrations.transformers.attention import attend, attention_map, scaled, scoring_of
from longspan.integrations.transformers.cache import GeneratesWithoutCopies
from longspan.integrations.transformers.config import LongspanConfig
from longspan.integrations.transformers.masks import View, read_mask
from longspan.nn.attention import Attention
from longspan.nn.decoder import Decoder
from longspan.nn.llama import Llama


class Pass(NamedTuple):
    """What every layer of one forward pass shares."""

    mask: Tensor | None
    positions: Tensor  # of the tokens, (time,) or (batch, time)
    past: Cache | None
    maps: list[Tensor] | None  # attention maps go here, if they are wanted

    def on(self, device: torch.device) -> "Pass":
        """For a layer there: a model may lie on several devices."""
        mask = None if self.mask is None else self.mask.to(device)
        return self._replace(mask=mask, positions=self.positions.to(device))


class HubAttention(Attention):
    """Our attention layer with a cache and a mask of transformers, which come as its `cache`."""

    index: int  # of the layer

    def forward(  # type: ignore[override]
        self, x: Tensor, *, lengths: None = None, documents: None = None, cache: Pass, last: None = None
    ) -> Tensor:
        q, k, v = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        q, k = self.query_norm(q).to(v.dtype), self.key_norm(k).to(v.dtype)
        cache = cache.on(x.device)
        q, k = self.position.rotate(q, cache.positions), self.position.rotate(k, cache.positions)
        if cache.past is not None:
            k, v = cache.past.update(k, v, self.index)
        view: View = read_mask(cache.mask, k.shape[2])
        q = scaled(q, x, view, self.scaler, self.position, self.causal)
        scoring = scoring_of(self.normalizer, self.scale, self.position.slopes, self.causal)
        if cache.maps is not None:
            cache.maps.append(attention_map(q, k, view, scoring))
        return self.output(attend(q, k, v, view, scoring).transpose(1, 2).flatten(2))


class LongspanForCausalLM(GeneratesWithoutCopies, PreTrainedModel, GenerationMixin):
    """`longspan.nn`'s `Decoder` or `Llama`, whichever the config's `style` says, as `decoder`."""

    config_class = LongspanConfig
    base_model_prefix = "decoder"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["Block"]
    # `cache` is the `Pass`, which moves by itself: what is written to a copy of it is lost.
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values", "cache"]
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def __init__(self, config: LongspanConfig):
        super().__init__(config)
        self.decoder: Decoder | Llama = config.build()
        layers = [layer for layer in self.decoder.modules() if isinstance(layer, Attention)]
        for index, layer in enumerate(layers):
            layer.__class__ = HubAttention
            layer.index = index  # type: ignore[assignment]
        self.gradient_checkpointing = False
        # Built on the meta device, nothing has a value yet, buffers neither: see `initialize_weights`.
        self._has_values = self.decoder.output.weight.device.type != "meta"
        self.post_init()

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Give what was not loaded the start that our own modules give it."""
        if self._has_values:
            return
        fresh = self.config.build()
        for name, parameter in self.decoder.named_parameters():
            if not getattr(parameter, "_is_hf_initialized", False):
                parameter.copy_(fresh.get_parameter(name))
        for name, value in fresh.named_buffers():  # no checkpoint holds them; put in place, they keep their digits
            owner, _, leaf = name.rpartition(".")
            setattr(self.decoder.get_submodule(owner), leaf, value.to(self.decoder.get_buffer(name).device))
        self._has_values = True

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention not in (None, "longspan"):
            raise ValueError(f"{type(self).__name__} has its own attention, 'longspan', not {requested_attention!r}")
        return "longspan"

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.decoder.embed = value

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder.output

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.decoder.output = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **options: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """As transformers' own models have it. Without a cache, `position_ids` that start anew mark documents."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.decoder.embed(input_ids) if inputs_embeds is None else inputs_embeds  # (B, T, D)
        recomputing = self.gradient_checkpointing and self.training
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if use_cache and past_key_values is None and not recomputing:
            past_key_values = DynamicCache(config=self.config)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        start = 0 if past_key_values is None else past_key_values.get_seq_length()
        positions = torch.arange(x.shape[1], device=x.device) + start if position_ids is None else position_ids
        shared = Pass(mask, positions, past_key_values, [] if output_attentions else None)
        x = x * self.config.hidden_size**0.5 if isinstance(self.decoder, Decoder) else x
        states = [x]
        for block in self.decoder.blocks:
            through = partial(block.__call__, lengths=None, documents=None, cache=shared)
            x = self._gradient_checkpointing_func(through, x) if recomputing else through(x)
            states.append(x)
        x = states[-1] = self.decoder.norm(x)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.decoder.output(x[:, kept])  # (B, T, V)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values,
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=None if shared.maps is None else tuple(shared.maps),
        )
        named = self.config.return_dict if return_dict is None else return_dict
        return output if named else output.to_tuple()
