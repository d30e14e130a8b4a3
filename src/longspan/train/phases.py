"""What changes in the course of a run: the slopes of distance biases at its start, noise once the task is learned.

Under entmax a slope is a window, and a circuit whose parts lie farther apart than windows reach may never be found. So
slopes may begin gentle and grow to their own, which then leave what is far to the heads without positions. Noise on
queries and keys asks for margins; from the start on it would hide what there is to learn.
"""

import torch
from torch import Tensor

from longspan.nn.decoder import Decoder
from longspan.nn.norm import HeadNorm
from longspan.nn.positions import Position
from longspan.train.config import RunConfig

_MEMORY = 0.01  # of the running mean of the accuracy


class Phases:
    """Which phase a run is in, by its step and by a running mean of its token accuracy."""

    def __init__(self, config: RunConfig, model: Decoder, device: torch.device):
        """Takes hold of the model: of its slopes while they grow, and of the gates of its noise."""
        self._config = config
        self._slopes: list[Tensor] = []
        if config.slope_steps:
            positions = [module for module in model.modules() if isinstance(module, Position)]
            self._slopes = [position.slopes for position in positions if position.slopes is not None]
            if not self._slopes:
                raise ValueError(f"slope_steps is for ALiBi and NAPE: {config.model.attention.position} has no slopes")
        self._grown = [slopes.clone() for slopes in self._slopes]
        self._tensors: dict[str, Tensor] = {}
        if config.model.attention.qk_noise:
            names = ("learned", "gate", "arrived") if self._slopes else ("learned", "gate")
            self._tensors = {name: torch.zeros((), device=device) for name in names}
            for module in model.modules():
                if isinstance(module, HeadNorm):
                    module.gate = self._tensors["gate"]
            self._open_gate()

    @property
    def noisy(self) -> bool:
        return bool(self._tensors)

    @torch.no_grad()
    def begin(self, step: int) -> None:
        """Before a step: the slopes it has. In place, so that a CUDA graph sees them."""
        if step > self._config.slope_steps or not self._slopes:
            return
        factor = slope_factor(step, self._config)
        torch._foreach_copy_(self._slopes, torch._foreach_mul(self._grown, factor))
        if self.noisy:
            self._tensors["arrived"].fill_(step == self._config.slope_steps)

    def take(self, accuracy: Tensor) -> None:
        """The accuracy of a step; only tensors, so that it can be part of a CUDA graph."""
        self._tensors["learned"].lerp_(accuracy, _MEMORY)
        self._open_gate()

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a resumed run needs, by name."""
        return self._tensors

    def load(self, state: dict[str, Tensor], step: int) -> None:
        """Take over the tensors of `state`, and the slopes of a run of so many steps."""
        for name, tensor in self._tensors.items():
            tensor.copy_(state[name])
        if self._slopes:
            self.begin(min(step, self._config.slope_steps))

    def _open_gate(self) -> None:
        """Once open it stays so."""
        gate, learned = self._tensors["gate"], self._tensors["learned"]
        opened = (learned >= self._config.noise_from).float()
        if "arrived" in self._tensors:
            opened = opened * self._tensors["arrived"]
        gate.copy_(torch.maximum(gate, opened))


def slope_factor(step: int, config: RunConfig) -> float:
    """What the slopes of a step are of their own: from `slope_start` to 1 by equal ratios."""
    return config.slope_start ** max(0.0, 1 - step / config.slope_steps) if config.slope_steps else 1.0
