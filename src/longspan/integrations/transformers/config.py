"""The config of our own models in the hub's format."""

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from longspan.nn.decoder import AttentionConfig, Decoder, DecoderConfig
from longspan.nn.llama import Llama
from longspan.train.config import from_json, to_json

STYLES: dict[str, type[Decoder] | type[Llama]] = {"decoder": Decoder, "llama": Llama}


class LongspanConfig(PreTrainedConfig):
    """Sizes under transformers' names, and the attention as `longspan.nn.decoder.AttentionConfig` has it.

    Args:
        style: "decoder", the model of the synthetic tasks, or "llama", the language model.
        attention: fields of `AttentionConfig`.
        max_position_embeddings: the context it was trained on, for those who ask; no length is refused.
        run: the step and the config of the run it was exported from, so that it can be imported again.
    """

    model_type = "longspan"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    style: str = "llama"
    vocab_size: int = 2048
    num_hidden_layers: int = 2
    hidden_size: int = 64
    intermediate_size: int = 192
    num_attention_heads: int = 4
    attention: dict[str, Any] | None = None
    max_position_embeddings: int | None = None
    run: dict[str, Any] | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.style not in STYLES:
            raise ValueError(f"style must be one of {', '.join(STYLES)}, got {self.style!r}")
        self.attention = to_json(from_json(AttentionConfig, self.attention or {}))  # every field, and none misspelt
        if self.tie_word_embeddings:
            raise ValueError("our models have an output of their own: tie_word_embeddings must be False")
        kwargs.setdefault("attn_implementation", "longspan")
        super().__post_init__(**kwargs)

    @property
    def num_key_value_heads(self) -> int:
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def of(cls, config: DecoderConfig, style: str, **others: Any) -> "LongspanConfig":
        """The config of a decoder of ours."""
        return cls(
            style=style,
            vocab_size=config.vocabulary,
            num_hidden_layers=config.layers,
            hidden_size=config.dim,
            intermediate_size=config.hidden,
            num_attention_heads=config.heads,
            attention=to_json(config.attention),
            **others,
        )

    def sizes(self) -> DecoderConfig:
        """The same as our own modules have it."""
        return DecoderConfig(
            vocabulary=self.vocab_size,
            layers=self.num_hidden_layers,
            dim=self.hidden_size,
            hidden=self.intermediate_size,
            heads=self.num_attention_heads,
            attention=from_json(AttentionConfig, self.attention or {}),
        )

    def build(self) -> Decoder | Llama:
        """The model of ours that this describes, with fresh weights."""
        return STYLES[self.style](self.sizes())
