"""From torchtitan's checkpoints to our model, whose evaluation is ours."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from longspan.nn.decoder import DecoderConfig
from longspan.nn.llama import Llama

_NAMES = (
    (r"^tok_embeddings\.", "embed."),
    (r"^lm_head\.", "output."),
    (r"^layers\.(\d+)\.attention\.layer\.", r"blocks.\1.attention."),
    (r"^layers\.(\d+)\.attention_norm\.", r"blocks.\1.before_attention."),
    (r"^layers\.(\d+)\.ffn_norm\.", r"blocks.\1.before_mlp."),
    (r"^layers\.(\d+)\.feed_forward\.w1\.", r"blocks.\1.gate."),
    (r"^layers\.(\d+)\.feed_forward\.w2\.", r"blocks.\1.down."),
    (r"^layers\.(\d+)\.feed_forward\.w3\.", r"blocks.\1.up."),
)


def our_name(name: str) -> str:
    """What `longspan.nn.llama.Llama` calls a parameter of torchtitan's model."""
    for pattern, ours in _NAMES:
        name = re.sub(pattern, ours, name)
    return name


def their_name(name: str) -> str:
    """The other way round."""
    for pattern, ours in _NAMES:
        if match := re.match(ours.replace(".", r"\.").replace(r"\1", r"(\d+)"), name):
            theirs = pattern.removeprefix("^").replace(r"\.", ".").replace(r"(\d+)", next(iter(match.groups()), ""))
            return theirs + name[match.end() :]
    return name


def llama_of(state: Mapping[str, Tensor], sizes: DecoderConfig) -> Llama:
    """Our model with the weights of torchtitan's."""
    model = Llama(sizes)
    model.load_state_dict({our_name(name): tensor for name, tensor in state.items()})
    return model


def load_checkpoint(folder: Path, sizes: DecoderConfig) -> Llama:
    """Our model from a folder ``step-N`` that torchtitan wrote with any number of processes."""
    from torch.distributed.checkpoint.state_dict_loader import load

    model = Llama(sizes)
    state = {their_name(name): torch.empty_like(tensor) for name, tensor in model.state_dict().items()}
    load(state, checkpoint_id=str(folder), no_dist=True)
    return llama_of(state, sizes)
