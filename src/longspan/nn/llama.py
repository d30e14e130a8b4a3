"""The language model of the paper, after LLaMA 3: RMS norm before each sublayer, SwiGLU, no biases, untied output."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from longspan.nn.attention import Attention, last_tokens
from longspan.nn.cache import KVCache
from longspan.nn.decoder import AttentionConfig, DecoderConfig, attention_of, through
from longspan.nn.norm import RMSNorm
from longspan.nn.positions import RoPE


class Size(NamedTuple):
    layers: int
    dim: int
    hidden: int
    heads: int
    vocabulary: int  # at which the size has the number of parameters in its name; any other goes too


PRESETS: dict[str, Size] = {
    # LLaMA-3's FFN, 1.3 times 8/3 of the width up to a multiple of 1024, is 3072 wide; with it, two untied matrices
    # and LLaMA-3's vocabulary the paper's sizes come to its 420M.
    "420m": Size(layers=24, dim=768, hidden=3072, heads=12, vocabulary=128_256),
    # The paper's scaling-law model: about 120M with GPT-2's 50,257 tokens counted once.
    "120m": Size(layers=12, dim=768, hidden=2048, heads=12, vocabulary=24_576),
    "50m": Size(layers=10, dim=512, hidden=1536, heads=8, vocabulary=16_384),
    "10m": Size(layers=6, dim=256, hidden=1024, heads=8, vocabulary=8_192),
    "tiny": Size(layers=2, dim=64, hidden=192, heads=4, vocabulary=2_048),
}


def preset(name: str, vocabulary: int | None = None, attention: AttentionConfig | None = None) -> DecoderConfig:
    """The sizes called `name`; by default ASEntmax under NAPE with exponential slopes."""
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    size = PRESETS[name]
    attention = AttentionConfig(slopes="exponential") if attention is None else attention
    sizes = size if vocabulary is None else size._replace(vocabulary=vocabulary)
    return DecoderConfig(**sizes._asdict(), attention=attention)


def parameter_count(config: DecoderConfig) -> int:
    """Parameters of the decoder, without building it: all of it but the scalers', the embedding and output included."""
    block = 4 * config.dim**2 + 3 * config.dim * config.hidden + 2 * config.dim
    return 2 * config.vocabulary * config.dim + config.layers * block + config.dim


def flops_per_token(config: DecoderConfig, context: int) -> int:
    """Floating-point operations of a training step per token, as the model flops utilisation counts them.

    6 for every parameter but the embedding's, a lookup, and 12 for every score of every layer's width (Chowdhery et al.
    2022). Attention counts as dense and not causal whatever a method skips, so that all methods count alike.
    """
    multiplied = parameter_count(config) - config.vocabulary * config.dim
    return 6 * multiplied + 12 * config.layers * config.dim * context


class Llama(nn.Module):
    """Tokens (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, eps=1e-5)
        self.output = nn.Linear(config.dim, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            # A scaler keeps its own start. What writes to the residual stream starts smaller, so that the stream has
            # the same size at any depth.
            if parameter.ndim == 2 and ".scaler." not in name:
                writes = name.endswith(("attention.output.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5 if writes else 0.02)

    def forward(
        self,
        tokens: Tensor,
        *,
        lengths: Tensor | None = None,
        documents: Tensor | None = None,
        caches: list[KVCache] | None = None,
        only: Tensor | None = None,
        last: int | None = None,
    ) -> Tensor:
        """`lengths`, `documents`: see `Attention`; `only`, `last`: see `Decoder`."""
        x = self.features(tokens, lengths=lengths, documents=documents, caches=caches, last=last)
        if only is not None:
            x = x[:, only - (tokens.shape[1] - x.shape[1])]
        return self.output(x)  # (B, T, V)

    def features(
        self,
        tokens: Tensor,
        *,
        lengths: Tensor | None = None,
        documents: Tensor | None = None,
        caches: list[KVCache] | None = None,
        last: int | None = None,
    ) -> Tensor:
        """What the output layer reads, (batch, time, dim): for those who want the logits piece by piece."""
        x = self.embed(tokens)  # (B, T, D)
        x = through(self.blocks, x, caches, last, lengths=lengths, documents=documents)
        return self.norm(x)

    def new_caches(self) -> list[KVCache]:
        """Empty caches, one per layer."""
        return [KVCache() for _ in self.blocks]


class Block(nn.Module):
    """Attention, then SwiGLU, each after a norm and added to its input."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        dim, hidden = config.dim, config.hidden
        self.before_attention, self.before_mlp = RMSNorm(dim, eps=1e-5), RMSNorm(dim, eps=1e-5)
        self.attention = attention_of(config.attention, dim, config.heads)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, *, last: int | None = None, **options: Any) -> Tensor:
        """(batch, time, dim), or of the last tokens alone; `options`: of the attention."""
        x = last_tokens(x, last) + self.attention(self.before_attention(x), last=last, **options)
        h = self.before_mlp(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def rebase(model: Llama, base: float) -> Llama:
    """Give a trained RoPE model another base in place, the adjusted base frequency; the paper's is 500,000."""
    if not 1 < base < math.inf:
        raise ValueError(f"the base of RoPE must be more than 1, got {base}")
    for layer in model.modules():
        if isinstance(layer, Attention):
            if not isinstance(layer.position, RoPE):
                raise ValueError(f"only RoPE has a base to adjust, this model has {type(layer.position).__name__}")
            layer.position = layer.position.rebased(base)
    attention = replace(model.config.attention, rope_base=base)
    model.config = replace(model.config, attention=attention)
    return model
