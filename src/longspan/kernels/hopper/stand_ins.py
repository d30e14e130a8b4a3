"""Stand-ins for Gluon's words in Triton's interpreter, which has none.

They are strict. What is copied arrives when it is waited for and not before, and a product reads its factors when it is
waited for and not before: a wait that is missing or a buffer that is filled too early gives wrong numbers. What they
cannot see is memory that the compiler takes for a change of layout where copies are still heading.
"""

import operator
from typing import Any

import triton.language as tl


class _Copies:
    """Groups of copies under way, oldest first."""

    def __init__(self) -> None:
        self.groups: list[list[tuple[_Shared, Any]]] = [[]]

    def async_copy_global_to_shared(self, shared: "_Shared", places: Any, mask: Any) -> None:
        under_way = ((other.slots, other.slot) for group in self.groups for other, _ in group)
        same = any(slots is shared.slots and slot == shared.slot for slots, slot in under_way)
        assert not same, "two copies to one place are under way, and either may be the last"
        self.groups[-1].append((shared, tl.load(places, mask=mask, other=0.0)))

    def commit_group(self) -> None:
        self.groups.append([])

    def wait_group(self, outstanding: Any) -> None:
        while len(self.groups) - 1 > operator.index(outstanding):
            for shared, values in self.groups.pop(0):
                shared.store(values)


class _Shared:
    """A part of shared memory: some slots, of which `slot` is meant, or its transpose."""

    def __init__(self, slots: dict[int, Any], slot: int = 0, transposed: bool = False) -> None:
        self.slots, self.slot, self.transposed = slots, slot, transposed

    def index(self, slot: Any) -> "_Shared":
        return _Shared(self.slots, operator.index(slot))

    def permute(self, _order: tuple[int, int]) -> "_Shared":
        return _Shared(self.slots, self.slot, not self.transposed)

    def store(self, values: Any) -> None:
        self.slots[self.slot] = values

    def load(self, _layout: None = None) -> Any:
        values = self.slots[self.slot]
        return tl.trans(values) if self.transposed else values


class _Product:
    """A product under way."""

    def __init__(self, a: Any, b: _Shared, total: Any, use_acc: bool) -> None:
        self.factors, self.total, self.use_acc, self.value = (a, b), total, use_acc, None

    def finish(self) -> None:
        a, b = (each.load() if isinstance(each, _Shared) else each for each in self.factors)
        total = self.total.value if isinstance(self.total, _Product) else self.total
        self.value = tl.dot(a, b, total if self.use_acc else None)


_products: list[_Product] = []


def warpgroup_mma(a: Any, b: _Shared, acc: Any, use_acc: Any = True, is_async: bool = True) -> _Product:
    assert is_async
    _products.append(_Product(a, b, acc, bool(use_acc)))
    return _products[-1]


def warpgroup_mma_wait(outstanding: Any, deps: list[Any]) -> Any:
    while len(_products) > operator.index(outstanding):
        _products.pop(0).finish()
    values = tuple(each.value if isinstance(each, _Product) else each for each in deps)
    assert all(value is not None for value in values), "not all of these are waited for"
    return values[0] if len(values) == 1 else values


def fence_async_shared() -> None: ...


async_copy = _Copies()


class gl:
    """Of `triton.experimental.gluon.language` what Triton's language has not."""

    @staticmethod
    def arange(start: Any, end: Any, _layout: None) -> Any:
        return tl.arange(start, end)

    @staticmethod
    def zeros(shape: Any, dtype: Any, _layout: None) -> Any:
        return tl.zeros(shape, dtype)

    @staticmethod
    def convert_layout(values: Any, _layout: None) -> Any:
        return values

    @staticmethod
    def allocate_shared_memory(_dtype: Any, _shape: list[Any], _layout: None) -> _Shared:
        return _Shared({})

    @staticmethod
    def num_warps() -> int:
        return 4

    @staticmethod
    def _no_layout(*_arguments: Any) -> None: ...

    BlockedLayout = SliceLayout = DotOperandLayout = NVMMADistributedLayout = SwizzledSharedLayout = _no_layout

    class NVMMASharedLayout:
        @staticmethod
        def get_default_for(_shape: list[Any], _dtype: Any) -> None: ...
