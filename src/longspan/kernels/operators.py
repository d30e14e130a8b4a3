"""Operators of torch whose kernels run where their inputs are."""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef


def operator(name: str) -> "Callable[[Callable[..., Any]], CustomOpDef]":
    """Make a function an operator that changes none of its inputs, on the GPU of the first tensor among them.

    Triton launches on the current GPU and its stream, wherever the tensors are, and torch leaves it to an operator to
    say which that is: a model spread over several GPUs calls layers on all of them from one thread.
    """

    def register(function: Callable[..., Any]) -> "CustomOpDef":
        @wraps(function)
        def there(*arguments: Any, **options: Any) -> Any:
            tensor = next(argument for argument in arguments if isinstance(argument, torch.Tensor))
            with torch.cuda.device_of(tensor):
                return function(*arguments, **options)

        return torch.library.custom_op(f"longspan::{name}", mutates_args=())(there)

    return register
