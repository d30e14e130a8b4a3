"""Optimisers whose whole step is tensor operations, so that it can be captured in a CUDA graph.

Muon (Jordan et al. 2024) moves each hidden matrix by its momentum made orthogonal: every direction of the update gets
the same length. The orthogonalisation is a polynomial iteration in matrix products; matrices of one shape go through it
together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from longspan.train.config import OptimizerConfig

# Jordan's quintic: p(x) = a x + b x^3 + c x^5 sends singular values in (0, 1] to about [0.7, 1.2] in five steps.
_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalized(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices, roughly, of a stack (k, rows, columns)."""
    a, b, c = _QUINTIC
    dtype = torch.bfloat16 if matrices.is_cuda else torch.float32
    x = matrices.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (torch.linalg.matrix_norm(x, dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def muon_update(gradients: Tensor, momentum: Tensor, shrink: Tensor, config: OptimizerConfig) -> Tensor:
    """Where Muon moves matrices (k, rows, columns) at a rate of 1; the momentum takes in gradients over `shrink`."""
    rows, columns = momentum.shape[1:]
    gradients = gradients / shrink
    momentum.lerp_(gradients, 1 - config.momentum)
    ahead = gradients.lerp(momentum, config.momentum)  # Nesterov's look
    return orthogonalized(ahead) * max(1.0, rows / columns) ** 0.5


def moved(parameters: list[Tensor], updates: Sequence[Tensor], rate: Tensor, config: OptimizerConfig) -> None:
    """Take the updates off parameters that have decayed, in place."""
    for parameter, update in zip(parameters, updates, strict=True):
        if config.weight_decay:
            parameter.mul_(1 - rate * config.weight_decay)
        parameter.sub_(rate * update)


def muon_step(
    parameters: list[Tensor],
    gradients: list[Tensor],
    momentum: Tensor,
    shrink: Tensor,
    rate: Tensor,
    config: OptimizerConfig,
) -> None:
    """Move parameters of one shape along their gradients divided by `shrink`; `momentum` is (k, rows, columns)."""
    update = muon_update(torch.stack(gradients), momentum, shrink, config)
    moved(parameters, update.unbind(), rate, config)


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon may move it: a matrix inside a block that is not a scaler's projection."""
    return parameter.ndim == 2 and ".blocks." in f".{name}" and ".scaler." not in name


def momentum_name(shape: torch.Size) -> str:
    """What a checkpoint calls the momentum of the matrices of a shape."""
    return f"momentum.{'x'.join(map(str, shape))}"


class Optimizer:
    """AdamW, or Muon with AdamW beside it, over the parameters of a model.

    `rate` multiplies every learning rate: a tensor, so that a schedule can move it without touching the graph.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig):
        self.config = config
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        device = next(iter(self.parameters.values())).device
        self.rate = torch.ones((), device=device)
        self.count = torch.zeros((), device=device)
        groups: dict[torch.Size, list[str]] = {}
        if config.name == "muon":
            for name, parameter in self.parameters.items():
                if is_hidden_matrix(name, parameter):
                    groups.setdefault(self._shape(name), []).append(name)
        self.muon_groups = groups
        moved_by_muon = {name for names in groups.values() for name in names}
        self.adam_names = [name for name in self.parameters if name not in moved_by_muon]
        self.momentum = {
            shape: torch.zeros(self._kept(len(names)), *shape, device=device) for shape, names in groups.items()
        }
        self.first = {name: torch.zeros_like(self.parameters[name]) for name in self.adam_names}
        self.second = {name: torch.zeros_like(self.parameters[name]) for name in self.adam_names}
        # Compiled, what surrounds the products of the orthogonalisation is two passes over memory instead of ten.
        self._muon = torch.compile(muon_step, dynamic=False) if device.type == "cuda" else muon_step

    def _shape(self, name: str) -> torch.Size:
        """Of a whole parameter."""
        return self.parameters[name].shape

    def _kept(self, count: int) -> int:
        """Of how many of `count` matrices the momentum lies here."""
        return count

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor]) -> Tensor:
        """Move every parameter; return the norm of the gradient before clipping. Overwrites `gradients`."""
        norm = self._norm(torch.stack(torch._foreach_norm(list(gradients.values()))))
        shrink = (norm / self.config.clip).clamp_min(1) if self.config.clip is not None else torch.ones_like(norm)
        self.count += 1
        self._adam(gradients, shrink)
        self._move_matrices(gradients, shrink)
        return norm

    def _norm(self, norms: Tensor) -> Tensor:
        """The norm of the gradient from those of its parts."""
        return torch.linalg.vector_norm(norms)

    def _move_matrices(self, gradients: dict[str, Tensor], shrink: Tensor) -> None:
        for shape, names in self.muon_groups.items():
            self._muon(
                [self.parameters[name].detach() for name in names],
                [gradients[name] for name in names],
                self.momentum[shape],
                shrink,
                self.rate * self.config.muon_learning_rate,
                self.config,
            )

    def _adam(self, gradients: dict[str, Tensor], shrink: Tensor) -> None:
        torch._fused_adamw_(  # one kernel, which divides the gradients by `shrink` on the way
            [self.parameters[name] for name in self.adam_names],
            [gradients[name] for name in self.adam_names],
            list(self.first.values()),
            list(self.second.values()),
            [],
            [self.count] * len(self.adam_names),
            lr=self.rate * self.config.learning_rate,
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            weight_decay=self.config.weight_decay,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=shrink.float(),
        )

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a resumed run needs, by name."""
        tensors = {"count": self.count}
        tensors |= {f"first.{name}": tensor for name, tensor in self.first.items()}
        tensors |= {f"second.{name}": tensor for name, tensor in self.second.items()}
        tensors |= {momentum_name(shape): tensor for shape, tensor in self.momentum.items()}
        return tensors

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Take over the tensors of `state`."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
