"""Noise on queries and keys, from the moment that the task is learned.

It asks for margins: scores must differ by more than the few distractors of a short sequence ask for. From the start on
it would hide what there is to learn.
"""

import torch
from torch import Tensor

from longspan.nn.decoder import Decoder
from longspan.nn.norm import HeadNorm
from longspan.train.config import RunConfig

_MEMORY = 0.01  # of the running mean of the accuracy


class NoiseGate:
    """Opens the noise of a model by a running mean of its token accuracy. Once open it stays so."""

    def __init__(self, config: RunConfig, model: Decoder, device: torch.device):
        """Puts a gate of its own into every norm that has noise."""
        self._from = config.noise_from
        self._tensors: dict[str, Tensor] = {}
        if config.model.attention.qk_noise:
            self._tensors = {name: torch.zeros((), device=device) for name in ("learned", "gate")}
            for module in model.modules():
                if isinstance(module, HeadNorm):
                    module.gate = self._tensors["gate"]
            self._open()

    def __bool__(self) -> bool:
        """Whether there is any noise."""
        return bool(self._tensors)

    def take(self, accuracy: Tensor) -> None:
        """The accuracy of a step; only tensors, so that it can be part of a CUDA graph."""
        self._tensors["learned"].lerp_(accuracy, _MEMORY)
        self._open()

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a resumed run needs, by name."""
        return self._tensors

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over the tensors of `state`."""
        for name, tensor in self._tensors.items():
            tensor.copy_(state[name])

    def _open(self) -> None:
        gate, learned = self._tensors["gate"], self._tensors["learned"]
        gate.copy_(torch.maximum(gate, (learned >= self._from).float()))
