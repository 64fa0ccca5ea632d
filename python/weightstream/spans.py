"""Byte intervals of tensors: where a tensor's bytes lie, and which plain tensors a tensor subclass is made of.

Ownership, ties and the recorder's lookups all go by these intervals, never by storage or object identity. Pure torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

InnerPath = tuple[str, ...]
"""Attribute names that lead from a wrapper subclass to one of its inner tensors; empty for the tensor itself."""

_PLAIN = (Tensor, nn.Parameter)
_storage_address = getattr(torch._C, "_data_address", None)


class Span(NamedTuple):
    """A half-open byte interval of one address space."""

    address: int
    """First byte."""
    nbytes: int
    """Length; zero for an empty tensor, whose address means nothing."""

    @property
    def end(self) -> int:
        """The first byte behind the interval."""
        return self.address + self.nbytes


def extent(tensor: Tensor) -> int:
    """Bytes from a strided tensor's first element to the end of its last, gaps included."""
    if tensor.numel() == 0:
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (reach + 1) * tensor.element_size()


def span_of(tensor: Tensor) -> Span:
    """The interval a plain strided tensor covers. Does not materialize copy-on-write storage."""
    nbytes = extent(tensor)
    if nbytes == 0:
        return Span(0, 0)
    if _storage_address is None:
        return Span(tensor.data_ptr(), nbytes)
    # data_ptr() would copy a copy-on-write storage, which makes two tensors of what is one until written.
    return Span(_storage_address(tensor) + tensor.storage_offset() * tensor.element_size(), nbytes)


def is_wrapper(tensor: Tensor) -> bool:
    """Whether the tensor is a subclass that is made of inner tensors (it offers ``__tensor_flatten__``)."""
    return type(tensor) not in _PLAIN and hasattr(type(tensor), "__tensor_flatten__")


def inner_tensors(tensor: Tensor) -> list[tuple[InnerPath, Tensor]]:
    """The plain tensors behind `tensor` with the attribute paths that reach them: itself, unless it is a wrapper."""
    if not is_wrapper(tensor):
        return [((), tensor)]
    names, _ = tensor.__tensor_flatten__()
    return [((name, *path), leaf) for name in names for path, leaf in inner_tensors(getattr(tensor, name))]


def tensor_bytes(module: nn.Module) -> int:
    """Bytes of the parameters and buffers under `module`, each storage interval once. Also counts meta tensors."""
    seen: dict[tuple[int, int], int] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            continue
        for _, leaf in inner_tensors(tensor):
            if leaf.layout == torch.strided:
                key = (leaf.untyped_storage()._cdata, leaf.storage_offset())
                seen[key] = max(seen.get(key, 0), extent(leaf))
    return sum(seen.values())
