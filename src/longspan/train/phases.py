"""What a run begins only once the task is learned: sparsity, and noise on queries and keys.

Where weights are exactly zero there is no gradient, and noise hides one that is small, so a circuit of several heads
may never be found. A run may begin as softmax, which entmax then takes over; once learned, noise asks for margins.
"""

import torch
from torch import Tensor

from longspan.nn.decoder import Decoder
from longspan.nn.norm import HeadNorm
from longspan.nn.normalizers import Entmax
from longspan.train.config import RunConfig

LOOK_EVERY = 50  # steps between two looks at whether softmax has done its part
LATEST = 0.75  # the share of the steps after which entmax begins, learned or not
_MEMORY = 0.01  # of the running mean of the accuracy


class Phases:
    """Which phase a run is in, by a running mean of its token accuracy."""

    def __init__(self, config: RunConfig, model: Decoder, device: torch.device):
        """Takes hold of the model: of the gates of its noise, and of its normalisers while they are soft."""
        self._config = config
        self._sparse = [module for module in model.modules() if isinstance(module, Entmax)]
        self._tensors: dict[str, Tensor] = {}
        if config.soft_until is not None:
            if not self._sparse or any(module.logit is not None for module in self._sparse):
                raise ValueError(
                    "soft_until is for entmax with a fixed alpha: "
                    f"{config.model.attention.method} with alpha {config.model.attention.alpha} has none"
                )
            self._tensors["sharp"] = torch.zeros((), device=device)
        if config.model.attention.qk_noise:
            self._tensors["gate"] = torch.zeros((), device=device)
            for module in model.modules():
                if isinstance(module, HeadNorm):
                    module.gate = self._tensors["gate"]
        if self._tensors:
            self._tensors["learned"] = torch.zeros((), device=device)
        self.soft = config.soft_until is not None
        self._apply()
        self._open_gate()

    def __bool__(self) -> bool:
        """Whether there is anything to begin."""
        return bool(self._tensors)

    @property
    def noisy(self) -> bool:
        return "gate" in self._tensors

    def take(self, accuracy: Tensor) -> None:
        """The accuracy of a step; only tensors, so that it can be part of a CUDA graph."""
        self._tensors["learned"].lerp_(accuracy, _MEMORY)
        self._open_gate()

    def look(self, step: int) -> bool:
        """Whether softmax ends here, and the model is another: the task is learned, or time is short."""
        if not self.soft or step % LOOK_EVERY:
            return False
        assert self._config.soft_until is not None
        if float(self._tensors["learned"]) < self._config.soft_until and step < LATEST * self._config.steps:
            return False
        self._tensors["sharp"].fill_(1)
        self._tensors["learned"].zero_()  # noise waits until entmax has learned it too
        self.soft = False
        self._apply()
        return True

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a resumed run needs, by name."""
        return self._tensors

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over the tensors of `state`."""
        for name, tensor in self._tensors.items():
            tensor.copy_(state[name])
        self.soft = "sharp" in self._tensors and not self._tensors["sharp"]
        self._apply()

    def _apply(self) -> None:
        for module in self._sparse:
            module.soft = self.soft

    def _open_gate(self) -> None:
        """Once open it stays so."""
        if not self.noisy:
            return
        gate, learned = self._tensors["gate"], self._tensors["learned"]
        opened = (learned >= self._config.noise_from).float()
        if "sharp" in self._tensors:
            opened = opened * self._tensors["sharp"]
        gate.copy_(torch.maximum(gate, opened))
