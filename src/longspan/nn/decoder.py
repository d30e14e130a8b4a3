"""A decoder-only transformer in the style of Gemma 2: RMS norm before and after each sublayer, GeGLU, untied output."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor, nn

from longspan.functional.scores import Rules, visible_tokens
from longspan.nn.attention import Attention, last_tokens
from longspan.nn.cache import KVCache
from longspan.nn.embedding import Embedding
from longspan.nn.gated import gated
from longspan.nn.methods import build_attention
from longspan.nn.norm import HeadNorm, RMSNorm
from longspan.nn.normalizers import Entmax, Normalizer, TopK
from longspan.nn.positions import (
    NAPE,
    ALiBi,
    LlamaScaling,
    Position,
    RoPE,
    exponential_slopes,
    linear_slopes,
    position_named,
)
from longspan.nn.residual import branch, merge, merge_and_branch, normed
from longspan.nn.scalers import Adaptive, NoScale, Scalable, Scaler


@dataclass(frozen=True)
class AttentionConfig:
    """A method by name, and the options of its parts; options of parts that the method does not have are unused."""

    method: str = "asentmax"
    position: str = "nape"
    alpha: float | Literal["learned"] = 1.5
    top_k: int = 32
    top_fraction: float | None = None  # in place of top_k
    delta: float = 1.0  # of SEntmax, ASSMax and ASEntmax; SSMax has 0, as in the released code
    gamma_range: float = 2.0
    initial_beta: float | None = 0.05
    initial_gamma: float = 0.0
    slopes: Literal["linear", "exponential"] = "linear"
    slope_factor: float = 1.0  # of all slopes: those made for softmax are short windows under entmax
    rope_base: float = 10_000.0
    rope_factor: float | None = None  # LLaMA-3 scaling
    rope_original_length: int = 64
    qk_norm: bool = False
    qk_gain: float = 1.0  # where the weights of the norms of q and k start
    qk_noise: float = 0.0  # on normalised q and k, in training
    qk_noise_on: Literal["scaled", "all"] = "scaled"  # the heads that a scaler may scale (NAPE: without slopes), or all
    qk_noise_layers: int | None = None  # the first ones, which have it; all by default


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder."""

    vocabulary: int
    layers: int
    dim: int
    hidden: int
    heads: int
    attention: AttentionConfig = field(default_factory=AttentionConfig)


class Decoder(nn.Module):
    """Tokens (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(_of_layer(config, index)) for index in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            # Gemma's start: every matrix N(0, 0.02). A scaler keeps its own.
            if parameter.ndim == 2 and ".scaler." not in name:
                nn.init.normal_(parameter, std=0.02)

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
        """`lengths`, `documents`: see `Attention`.

        Args:
            only: the time indices whose logits are wanted, all by default.
            last: how many of the last tokens they lie among. The last block then leaves out the others, but as keys.
        """
        x = self.hidden(tokens, caches=caches, last=last, lengths=lengths, documents=documents)
        if only is not None:
            x = x[:, only - (tokens.shape[1] - x.shape[1])]
        return self.logits(x)  # (B, T, V)

    def hidden(
        self, tokens: Tensor, *, caches: list[KVCache] | None = None, last: int | None = None, **options: Any
    ) -> Tensor:
        """What the last block says of every token, or of the last ones, (batch, time, dim)."""
        return through(self.blocks, self.embedded(tokens), caches, last, **options)

    def embedded(self, tokens: Tensor) -> Tensor:
        """What the first block reads."""
        return self.embed(tokens) * self.config.dim**0.5

    def logits(self, hidden: Tensor) -> Tensor:
        """What the output reads from it."""
        return self.output(normed(hidden, self.norm, self.output))

    def new_caches(self) -> list[KVCache]:
        """Empty caches, one per layer."""
        return [KVCache() for _ in self.blocks]


def _of_layer(config: DecoderConfig, index: int) -> DecoderConfig:
    """The config of a layer, counted from 0: noise may be for the first ones alone."""
    noisy = config.attention.qk_noise_layers
    if noisy is None or index < noisy:
        return config
    return replace(config, attention=replace(config.attention, qk_noise=0.0))


def through(
    blocks: nn.ModuleList, x: Tensor, caches: Sequence[KVCache] | None, last: int | None, **options: Any
) -> Tensor:
    """What the blocks make of x one after the other, the last block of the last tokens alone."""
    layers: Sequence[KVCache | None] = [None] * len(blocks) if caches is None else caches
    if caches is None and options.get("documents") is not None and options.get("lengths") is None:
        options["visible"] = _visible(blocks, x, options["documents"])
    if last == x.shape[1]:
        last = None  # so that one compilation serves every block
    for index, (block, cache) in enumerate(zip(blocks, layers, strict=True), start=1):
        x = block(x, cache=cache, last=last if index == len(blocks) else None, **options)
    return x


def _visible(blocks: nn.ModuleList, x: Tensor, documents: Tensor) -> Tensor | None:
    """The tokens that each token of x sees, counted once for all layers; None where no layer asks."""
    layers = [part for part in blocks.modules() if isinstance(part, Attention)]
    if documents.shape != x.shape[:2] or all(isinstance(layer.scaler, NoScale) for layer in layers):
        return None
    rules = Rules(scale=1.0, causal=all(layer.causal for layer in layers), documents=documents.to(x.device))
    return visible_tokens(rules, x.shape[1], x.shape[1], x.shape[0], x.device)


class Block(nn.Module):
    """Attention, then GeGLU, each between two norms and added to its input."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        dim, hidden = config.dim, config.hidden
        self.before_attention, self.after_attention = RMSNorm(dim), RMSNorm(dim)
        self.before_mlp, self.after_mlp = RMSNorm(dim), RMSNorm(dim)
        self.attention = attention_of(config.attention, dim, config.heads)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, *, last: int | None = None, **options: Any) -> Tensor:
        """(batch, time, dim), or of the last tokens alone; `options`: of the attention."""
        x, h = branch(x, self.before_attention, self.attention.query)
        attended = self.attention(h, last=last, **options)
        x, h = merge_and_branch(last_tokens(x, last), attended, self.after_attention, self.before_mlp, self.gate)
        return merge(x, self.down(gated(self.gate, self.up, h)), self.after_mlp)


def attention_of(config: AttentionConfig, dim: int, heads: int) -> Attention:
    """The attention layer that `config` describes."""
    if config.qk_noise_layers is not None and config.qk_noise_layers < 0:
        raise ValueError(f"qk_noise_layers must not be negative, got {config.qk_noise_layers}")
    if not config.slope_factor > 0:
        raise ValueError(f"slope_factor must be positive, got {config.slope_factor}")
    normalizer: Normalizer | None = None
    if config.method in ("entmax", "sentmax", "asentmax"):
        normalizer = Entmax(config.alpha, heads)
    elif config.method == "topk":
        fraction = config.top_fraction
        normalizer = TopK(k=config.top_k) if fraction is None else TopK(fraction=fraction)
    position = _position_of(config, heads, dim // heads)
    norms: dict[str, Any] = {}
    if config.qk_norm:
        noisy = position.scaled | (config.qk_noise_on == "all")
        for name in ("query_norm", "key_norm"):
            norms[name] = HeadNorm(dim // heads, noisy, config.qk_gain, config.qk_noise)
    elif config.qk_noise:
        raise ValueError("qk_noise is measured in units of normalised queries and keys: it needs qk_norm")
    return build_attention(
        config.method,
        dim,
        heads,
        normalizer=normalizer,
        scaler=_scaler_of(config, dim, heads),
        position=position,
        **norms,
    )


def _scaler_of(config: AttentionConfig, dim: int, heads: int) -> Scaler | None:
    """The scaler with the options of `config`, None where the method has none to be given."""
    beta, gamma = config.initial_beta, config.initial_gamma
    if config.method == "sentmax":
        return Scalable(dim, heads, config.delta, initial_beta=beta, initial_gamma=gamma)
    if config.method in ("assmax", "asentmax"):
        return Adaptive(dim, heads, config.delta, config.gamma_range, initial_beta=beta, initial_gamma=gamma)
    return None


def _position_of(config: AttentionConfig, heads: int, head_dim: int) -> Position:
    named = {"linear": linear_slopes, "exponential": exponential_slopes}[config.slopes]

    def slopes(heads: int) -> Tensor:
        return config.slope_factor * named(heads)

    if config.position == "alibi":
        return ALiBi(heads, head_dim, slopes)
    if config.position == "nape":
        return NAPE(heads, head_dim, slopes)
    if config.position == "rope":
        factor = config.rope_factor
        scaling = None if factor is None else LlamaScaling(factor, config.rope_original_length)
        return RoPE(heads, head_dim, config.rope_base, scaling)
    return position_named(config.position, heads, head_dim)
