"""Copies of a model's matrices in bfloat16, made once a step.

Autocast casts every matrix of a product where it is used, and every gradient back, each by a launch of its own: much
of the step of a small model. Copies are refreshed together, and on a GPU by the optimiser's own kernel. The numbers are
the same, bit for bit.
"""

import copy

import torch
from torch import Tensor, nn

from longspan.nn.decoder import Decoder


class LowCopies:
    """A second model to compute with: its `nn.Linear` weights are copies in a lower precision, all other parameters are
    the first model's own. For use under autocast, which would round the same weights to the same numbers.

    Attributes:
        model: the second model.
    """

    def __init__(self, model: Decoder, dtype: torch.dtype = torch.bfloat16):
        self.model = copy.deepcopy(model)
        theirs = dict(model.named_modules())
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}  # name: the copy and what it is a copy of
        for path, module in self.model.named_modules():
            for key, parameter in list(theirs[path].named_parameters(recurse=False)):
                if isinstance(module, nn.Linear) and key == "weight":
                    low = nn.Parameter(parameter.detach().to(dtype))
                    self._pairs[f"{path}.{key}"] = low, parameter
                    setattr(module, key, low)
                else:
                    setattr(module, key, parameter)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The copies, by the names of what they are copies of."""
        return {name: low for name, (low, _) in self._pairs.items()}

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy anew, after the first model has moved."""
        copies, originals = zip(*self._pairs.values(), strict=True)
        torch._foreach_copy_(copies, originals)

    def full(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients of the second model in the precision of the first."""
        return gradients | {name: gradients[name].to(original.dtype) for name, (_, original) in self._pairs.items()}
