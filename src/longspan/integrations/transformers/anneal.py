"""Alpha over the course of a fine-tuning: from softmax to entmax without a jump."""

from typing import Any

from torch import nn
from transformers import TrainerCallback

from longspan.integrations.transformers.convert import set_alpha


def annealed(progress: float, start: float = 1.0, end: float = 1.5, share: float = 0.5, stages: int = 20) -> float:
    """Alpha at a point of training between 0 and 1: up from `start` to `end` in equal stages over the first `share`."""
    done = min(1.0, progress / share) if share > 0 else 1.0
    return start + (end - start) * int(done * stages) / stages


class AnnealAlpha(TrainerCallback):
    """For `Trainer(..., callbacks=[AnnealAlpha()])`: moves alpha before every step, see `annealed`."""

    def __init__(self, start: float = 1.0, end: float = 1.5, share: float = 0.5, stages: int = 20):
        if not 1 <= start <= 64 or not 1 <= end <= 64:
            raise ValueError(f"alpha must be between 1 and 64, got {start} to {end}")
        if not 0 <= share <= 1 or stages < 1:
            raise ValueError(f"share must be between 0 and 1 and stages at least 1, got {share} and {stages}")
        self.schedule = {"start": start, "end": end, "share": share, "stages": stages}
        self._alpha: float | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **others: Any) -> None:
        progress = state.global_step / (state.max_steps - 1) if state.max_steps > 1 else 1.0
        alpha = annealed(progress, **self.schedule)  # type: ignore[arg-type]
        if alpha != self._alpha:
            set_alpha(model, alpha)
            self._alpha = alpha
