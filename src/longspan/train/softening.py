"""A soft start: the first steps of a run with smaller alphas than its own, down to softmax.

Where weights are exactly zero nothing is learned of what lies behind them; with a smaller alpha fewer are.
"""

from torch import nn

from longspan.nn.normalizers import Entmax
from longspan.train.config import RunConfig


def alpha_at(config: RunConfig, step: int) -> float:
    """The alpha of a step, counted from 0."""
    own = config.model.attention.alpha
    assert own != "learned"  # `check` has seen to it
    return next((alpha for end, alpha in config.first_alphas if step < end), own)


def is_soft(config: RunConfig, step: int) -> bool:
    """Whether a step has another alpha than the run's own."""
    return bool(config.first_alphas) and alpha_at(config, step) != config.model.attention.alpha


def soften(model: nn.Module, config: RunConfig, step: int) -> bool:
    """Give `model` the alpha of a step; whether that is another one than it has."""
    if not config.first_alphas:
        return False
    alpha = alpha_at(config, step)
    others = [part for part in model.modules() if isinstance(part, Entmax) and part.fixed != alpha]
    for part in others:
        part.fixed = alpha
    return bool(others)
