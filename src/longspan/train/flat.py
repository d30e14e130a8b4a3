"""The step of an optimiser over flat memory: few launches, however many parameters a model has.

A small model's step is launches more than work. So all that AdamW moves lies in one piece of memory, and its weights,
moments, averages and copies in half precision are moved by one kernel; matrices of a shape that Muon moves lie in a
piece of their own, and are a stack without being stacked.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.kernels.adam import BLOCK, adam_step
from longspan.train.config import OptimizerConfig
from longspan.train.copies import LowCopies
from longspan.train.optimizers import Optimizer, moved, muon_update

_ALIGNED = 64  # numbers: 128 bytes in half precision, as matrix products like them


class FlatStep:
    """Moves what an `Optimizer` moves, its state, the copies and the averages with it. Their tensors stay what they
    are for everyone else, but lie side by side from now on."""

    def __init__(self, optimizer: Optimizer, copies: LowCopies, average: dict[str, Tensor], decay: float | None):
        self.optimizer, self._share = optimizer, 1 - (decay or 0.0)
        low = copies.tensors
        self._low = [name for name in optimizer.adam_names if name in low]
        self._full = [name for name in optimizer.adam_names if name not in low]
        device = optimizer.rate.device
        dtypes = {tensor.dtype for tensor in (*low.values(), *optimizer.parameters.values())}
        self._zeros = {dtype: torch.zeros(BLOCK, dtype=dtype, device=device) for dtype in dtypes}

        def all_joined(tensors: dict[str, Tensor]) -> Tensor:
            return joined([[tensors[name] for name in names] for names in (self._low, self._full)])

        self._weights = all_joined(optimizer.parameters)
        self._moments = all_joined(optimizer.first), all_joined(optimizer.second)
        self._copies = joined([[low[name] for name in self._low]])
        self._average = all_joined(average) if average else None
        self._stacks = {
            shape: (
                stacked([optimizer.parameters[name] for name in names]),
                stacked([low[name] for name in names]),
                stacked([average[name] for name in names]) if average else None,
            )
            for shape, names in optimizer.muon_groups.items()
        }
        self._muon = torch.compile(muon_step, dynamic=False) if optimizer.rate.is_cuda else muon_step

    @torch.no_grad()
    def take(self, gradients: dict[str, Tensor]) -> Tensor:
        """Move everything; return the norm of the gradient before clipping.

        Args:
            gradients: of the copies where there are any, in half precision, and of the other parameters.
        """
        config, optimizer = self.optimizer.config, self.optimizer
        parts = self._padded([gradients[name] for name in self._low])
        groups = list(optimizer.muon_groups.items())
        for _, names in groups:
            parts += [gradients[name].reshape(-1) for name in names]
        low = torch.cat(parts)
        full = torch.cat(self._padded([gradients[name] for name in self._full]))
        norm, shrink = adam_step(
            self._weights,
            self._copies,
            self._average,
            self._moments,
            low,
            full,
            optimizer.count,
            optimizer.rate,
            learning_rate=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            clip=config.clip,
            share=self._share,
        )
        begin = len(self._copies)
        for shape, names in groups:
            stack = low[begin : begin + len(names) * shape.numel()].view(len(names), *shape)
            momentum, of_shape = optimizer.momentum[shape], self._stacks[shape]
            self._muon(stack, momentum, *of_shape, shrink, optimizer.rate, self._share, config)
            begin += stack.numel()
        return norm

    def _padded(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients one after the other, with zeros where `joined` leaves room."""
        parts: list[Tensor] = []
        for gradient, room in zip(gradients, rooms([gradient.numel() for gradient in gradients]), strict=True):
            parts.append(gradient.reshape(-1))
            if room > gradient.numel():
                parts.append(self._zeros[gradient.dtype][: room - gradient.numel()])
        return parts


def rooms(sizes: Sequence[int]) -> list[int]:
    """What tensors of these sizes take in flat memory: each begins aligned, and together they fill whole blocks."""
    taken = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    if taken:
        taken[-1] += -sum(taken) % BLOCK
    return taken


def joined(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """One flat tensor for all; the given ones become views of it. Each group fills whole blocks."""
    sizes = [rooms([tensor.numel() for tensor in group]) for group in groups]
    first = next(tensor for group in groups for tensor in group)
    flat = first.detach().new_zeros(sum(map(sum, sizes)))
    begin = 0
    for group, group_rooms in zip(groups, sizes, strict=True):
        for tensor, room in zip(group, group_rooms, strict=True):
            _move_into(flat[begin : begin + tensor.numel()].view(tensor.shape), tensor)
            begin += room
    return flat


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor (k, rows, columns) for k of a shape; the given ones become views of it."""
    stack = torch.stack([tensor.detach() for tensor in tensors])
    for place, tensor in zip(stack, tensors, strict=True):
        _move_into(place, tensor)
    return stack


def _move_into(place: Tensor, tensor: Tensor) -> None:
    place.copy_(tensor.detach())
    tensor.data = place


def muon_step(
    gradients: Tensor,
    momentum: Tensor,
    weights: Tensor,
    copies: Tensor,
    average: Tensor | None,
    shrink: Tensor,
    rate: Tensor,
    share: float,
    config: OptimizerConfig,
) -> None:
    """Move a stack of matrices along their gradients over `shrink`, copy them, and let an average take in `share`."""
    rate = rate * config.muon_learning_rate
    update = muon_update(gradients.to(weights.dtype), momentum, shrink, config)
    moved([weights], [update], rate, config)
    copies.copy_(weights)
    if average is not None:
        average.lerp_(weights, share)
