"""Triton's interpreter for the tests: without its slowest habit, and with products that are the same on every machine.

Every call of one Triton function by another patches the whole language again (Triton 3.7: 1 ms, more than half of the
time of most kernels here), though the launch around it has patched it and nothing takes that back before its end. Here
a function does so only if it sees a part of the language that no function of the launch has seen before.

Products of tiles are the BLAS library's there, and with some of its kernels (OpenBLAS on Haswell and Zen) an element
is summed in an order that hangs on its place in the tile: equal keys have unequal scores then, and a score of the
backward is another number than it was in the forward. A GPU sums all elements alike, and so it is here.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy
from triton import language
from triton.runtime import interpreter

_PATCHED = ("_patch_lang", "InterpretedFunction", "GridExecutor", "InterpreterError", "InterpreterBuilder")


@cache
def _seen_by(function: Callable[..., Any]) -> frozenset[str]:
    """Which parts of the language are named in a function's module, those that the interpreter patches."""
    named = function.__globals__.values()
    return frozenset(part.__name__ for part in (language, language.core) if any(value is part for value in named))


def product(a: Any, b: Any, dtype: Any) -> Any:
    """``a @ b`` with every element summed in the same order, whichever of the two is transposed."""
    rows = numpy.ascontiguousarray(a, dtype)
    columns = numpy.ascontiguousarray(numpy.swapaxes(b, -1, -2), dtype)
    return numpy.einsum("...mk,...nk->...mn", rows, columns)


def _patch_once_a_launch() -> None:
    patched: set[str] = set()
    launch = interpreter.GridExecutor.__call__

    def launched(self: Any, *arguments: Any, **options: Any) -> Any:
        patched.clear()
        return launch(self, *arguments, **options)

    def called(self: Any, *arguments: Any, **options: Any) -> Any:
        if not _seen_by(self.fn) <= patched:
            interpreter._patch_lang(self.fn)
            patched.update(_seen_by(self.fn))
        try:
            return self.rewrite()(*arguments, **options)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = launched
    interpreter.InterpretedFunction.__call__ = called


def _sum_all_elements_alike() -> None:
    def create_dot(_self: Any, a: Any, b: Any, d: Any, _precision: Any, _imprecise: Any) -> Any:
        assert min(a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth) > 8, "products of 8 bits are not used here"
        return interpreter.TensorHandle(product(a.data, b.data, d.data.dtype) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def install() -> None:
    """Puts both in place; where Triton's own has other names than those known here, nothing is changed."""
    if all(hasattr(interpreter, name) for name in _PATCHED):
        _patch_once_a_launch()
        _sum_all_elements_alike()
