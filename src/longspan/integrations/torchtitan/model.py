"""The LLaMA-style decoder of `longspan.nn.llama` in torchtitan's terms: its embedding, norms and FFN, our attention.

The scale of ASEntmax is read from the layer's input, which torchtitan's inner attention never sees; so the whole
attention layer is ours. Data parallelism of any kind (FSDP, HSDP) goes; tensor, context and pipeline parallelism would
have to cut our layer in pieces and are refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common import Embedding, Linear, RMSNorm, TransformerBlock
from torchtitan.models.common.config_utils import make_ffn_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.utils import get_dense_model_nparams_and_flops
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from longspan.nn.decoder import AttentionConfig, DecoderConfig, attention_of

_EPSILON = 1e-5  # of the norms, as in `longspan.nn.llama`


class Attention(Module):
    """`longspan.nn.Attention` with torchtitan's arguments; positions tell where packed documents begin."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        n_heads: int
        parts: AttentionConfig
        layers: int  # of the model, which the start of the output projection depends on

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.layer = attention_of(config.parts, config.dim, config.n_heads)

    def forward(self, x: Tensor, attention_masks: Any = None, positions: Tensor | None = None) -> Tensor:
        if attention_masks is not None:
            raise ValueError("this attention takes no masks: packed documents are told by positions that begin again")
        return self.layer(x, documents=None if positions is None else documents_of(positions))

    def _init_self_parameters(self) -> None:
        """The start of `longspan.nn.llama`, into whatever part of every tensor lies on this process."""
        with torch.device("cpu"):
            start = attention_of(self.config.parts, self.config.dim, self.config.n_heads)
        for name, parameter in start.named_parameters():
            if parameter.ndim == 2 and not name.startswith("scaler."):
                nn.init.normal_(parameter, std=_std(self.config.layers if name.startswith("output.") else None))
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                _fill(parameter, start.get_parameter(name))

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        """Slopes and frequencies, which were on the meta device with the rest."""
        with torch.device("cpu"):
            start = attention_of(self.config.parts, self.config.dim, self.config.n_heads)
        place = next(self.layer.parameters()).device if buffer_device is None else buffer_device
        for name, buffer in start.named_buffers():
            owner, _, field = name.rpartition(".")
            self.layer.get_submodule(owner)._buffers[field] = buffer.to(place)


class Block(TransformerBlock):
    """Attention, then SwiGLU, each after a norm and added to its input."""

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):
        pass

    def __init__(self, config: Config):
        super().__init__()
        self.attention = config.attention.build()
        self.attention_norm, self.ffn_norm = config.attention_norm.build(), config.ffn_norm.build()
        self.feed_forward = config.feed_forward.build()

    def forward(self, x: Tensor, attention_masks: Any = None, positions: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), attention_masks, positions)
        return x + self.feed_forward(self.ffn_norm(x))


class Model(Decoder):
    """Tokens to logits."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        sizes: DecoderConfig

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Nothing depends on the run; what cannot go is refused before anything is built."""
            refuse(config.parallelism)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            sizes = self.sizes
            heads = 2 * (sizes.dim // sizes.heads)
            return get_dense_model_nparams_and_flops(model, sizes.layers, sizes.heads, heads, seq_len)

    def verify_module_protocol(self) -> None:
        """Our layer inside `Attention` is a plain module, which starts and shards through it."""


def refuse(parallelism: Any) -> None:
    """Raises ValueError for a way to parallelise that would cut our attention layer."""
    for axis in ("tensor", "context", "pipeline", "expert"):
        if getattr(parallelism, f"{axis}_parallel_degree", 1) > 1:
            raise ValueError(f"{axis} parallelism does not reach into longspan's attention: use data parallelism")
    if parallelism.spmd_backend != "partial_dtensor":
        raise ValueError(f'parallelism.spmd_backend must be "partial_dtensor", got {parallelism.spmd_backend!r}')


def parallelize(
    model: Model,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> Model:
    """Activation checkpointing, compilation block by block, then FSDP or HSDP."""
    from torchtitan.config import TORCH_DTYPE_MAP

    refuse(parallelism)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    axes = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    apply_fsdp_to_decoder(
        model,
        parallel_dims.get_mesh(axes),
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=False,
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
    )
    return model


def model_spec(sizes: DecoderConfig, flavor: str) -> ModelSpec:
    """What torchtitan builds and parallelises."""
    return ModelSpec(
        name="longspan",
        flavor=flavor,
        model=model_config(sizes),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def model_config(sizes: DecoderConfig) -> Model.Config:
    """The config tree of a decoder's sizes, with the start of `longspan.nn.llama`."""
    drawn, written, ones = _normal(_std()), _normal(_std(sizes.layers)), {"weight": nn.init.ones_}

    def norm() -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=sizes.dim, eps=_EPSILON, param_init=ones)

    def block() -> Block.Config:
        ffn = make_ffn_config(dim=sizes.dim, hidden_dim=sizes.hidden, w1_param_init=drawn, w2w3_param_init=drawn)
        ffn.w2.param_init = written
        parts = Attention.Config(dim=sizes.dim, n_heads=sizes.heads, parts=sizes.attention, layers=sizes.layers)
        return Block.Config(attention=parts, feed_forward=ffn, attention_norm=norm(), ffn_norm=norm())

    return Model.Config(
        sizes=sizes,
        dim=sizes.dim,
        vocab_size=sizes.vocabulary,
        tok_embeddings=Embedding.Config(num_embeddings=sizes.vocabulary, embedding_dim=sizes.dim, param_init=drawn),
        layers=[block() for _ in range(sizes.layers)],
        norm=norm(),
        lm_head=Linear.Config(in_features=sizes.dim, out_features=sizes.vocabulary, param_init=drawn),
    )


def documents_of(positions: Tensor) -> Tensor:
    """Ids of packed documents (batch, time) from positions that begin again at 0 with each."""
    return (positions == 0).cumsum(-1)


def _std(layers: int | None = None) -> float:
    """Of a matrix at the start, smaller for one that writes to the residual stream of so many layers."""
    return 0.02 if layers is None else 0.02 / (2 * layers) ** 0.5


def _normal(std: float) -> dict[str, Callable[..., Any]]:
    return {"weight": partial(nn.init.normal_, std=std)}


def _fill(parameter: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into a parameter or this process's part of it; the first process's counts for all."""
    value = value.detach().to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)
