"""Longspan in Hugging Face transformers. Importing this registers the attention ``"longspan"``; needs that extra.

    import longspan.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="longspan")

It also gives the Auto classes our own models (`LongspanForCausalLM`), and `convert`, which gives a pretrained model our
attention and its learned scales.
"""

from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from longspan.integrations.transformers.anneal import AnnealAlpha, annealed
from longspan.integrations.transformers.attention import longspan_attention
from longspan.integrations.transformers.cache import GrowingCache
from longspan.integrations.transformers.config import LongspanConfig
from longspan.integrations.transformers.convert import convert, set_alpha
from longspan.integrations.transformers.masks import longspan_mask
from longspan.integrations.transformers.model import LongspanForCausalLM

NAME = "longspan"

AttentionInterface.register(NAME, longspan_attention)
AttentionMaskInterface.register(NAME, longspan_mask)
AutoConfig.register(LongspanConfig.model_type, LongspanConfig)
AutoModelForCausalLM.register(LongspanConfig, LongspanForCausalLM)

__all__ = [
    "AnnealAlpha",
    "GrowingCache",
    "LongspanConfig",
    "LongspanForCausalLM",
    "annealed",
    "convert",
    "longspan_attention",
    "longspan_mask",
    "set_alpha",
]
