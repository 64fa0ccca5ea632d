"""The weight of a quantized layer for code that looks at it: type, shape and device at once, numbers when they are read.

Any operator that is given one reads its numbers first. Writing to one is refused: the packed bytes would stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_any, tree_map_only

from ..errors import StateError

__all__ = ["LazyWeight"]


class LazyWeight(Tensor):
    """A weight whose numbers are dequantized when an operator reads them."""

    layer: Any
    """The layer whose weight it is."""
    _read: Callable[[torch.dtype], Tensor]

    @staticmethod
    def __new__(cls, layer: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device, read: Any) -> LazyWeight:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=False)
        made.layer = layer
        made._read = read
        return made

    def numbers(self) -> Tensor:
        """The numbers, as a plain tensor of its own."""
        return self._read(self.dtype)

    @property
    def data(self) -> LazyWeight:  # type: ignore[override]
        """Itself."""
        return self

    @data.setter
    def data(self, value: Any) -> None:
        raise _refused("data = …")

    def requires_grad_(self, requires_grad: bool = True) -> LazyWeight:
        """Refuses True: packed numbers cannot be trained."""
        if requires_grad:
            raise StateError("a quantized weight cannot require grad: train an adapter beside it")
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.numbers()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.numbers().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return args[0]
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[position] if position < len(args) else kwargs.get(argument.name)
                if tree_any(lambda value: isinstance(value, cls), given):
                    raise _refused(func._schema.name)
        args, kwargs = tree_map_only(cls, lambda weight: weight.numbers(), (args, kwargs))
        return func(*args, **kwargs)


def _refused(what: str) -> StateError:
    return StateError(
        f"{what} on the weight of a quantized layer: the write would be lost; put a layer of floats in its place to change it"
    )
