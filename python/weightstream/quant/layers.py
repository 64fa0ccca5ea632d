"""The layers: linear, embedding and convolutions, each with the interface of PyTorch's own.

They are subclasses of PyTorch's, so that what looks for linear layers (adapters, above all) finds them.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._native import QuantWeight
from ..errors import QuantizationError
from .description import described
from .module import QuantModule
from .native_products import product
from .ops import dequantize_rows

__all__ = ["QuantConv1d", "QuantConv2d", "QuantConv3d", "QuantEmbedding", "QuantLinear", "quant_class"]


def _shape(weight: QuantWeight, dimensions: int, cls: type) -> list[int]:
    if len(weight.shape) != dimensions:
        raise QuantizationError(
            f"{weight.name} has the shape {weight.shape}, and the weight of a {cls.__name__} has {dimensions} dimensions"
        )
    return weight.shape


def _refuse_transforms(weight: QuantWeight, cls: type) -> None:
    if weight.transforms:
        raise QuantizationError(
            f"{weight.name}, {weight.format}, wants transformed inputs ({weight.transforms}), which a {cls.__name__} has not"
        )


def _bias(bias: Optional[Tensor]) -> Optional[nn.Parameter]:
    if bias is None or isinstance(bias, nn.Parameter):
        return bias
    return nn.Parameter(bias, requires_grad=False)


class QuantLinear(QuantModule, nn.Linear):
    """A linear layer with a quantized weight."""

    native_products: bool = False
    """Whether INT8 and FP8 weights may be multiplied as they are, which quantizes the inputs: faster, with other numbers."""

    @classmethod
    def from_parts(
        cls,
        weight: QuantWeight,
        parts: Mapping[str, Tensor],
        bias: Optional[Tensor] = None,
        *,
        dtype: Optional[torch.dtype] = None,
        hints: Optional[Mapping[str, Tensor]] = None,
        metadata: Optional[Mapping[str, str]] = None,
    ) -> QuantLinear:
        """A layer over packed tensors, by their names in `weight.parts`. `dtype` is that of `layer.weight`, bfloat16."""
        rows, columns = _shape(weight, 2, cls)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.in_features, made.out_features = columns, rows
        made._set_weight(weight, parts, dtype=dtype or torch.bfloat16, hints=hints, metadata=metadata)
        made.register_parameter("bias", _bias(bias))
        return made

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output, in the type of its inputs or of autocast."""
        dtype = self._compute_type(input)
        bias = self.bias
        if bias is not None and bias.dtype != dtype:
            bias = bias.to(dtype)
        input = self._transformed(input.to(dtype))
        if self.native_products:
            output = product(self, input, bias)
            if output is not None:
                return output
        return F.linear(input, self._numbers(dtype), bias)

    def extra_repr(self) -> str:
        """In words."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.format}"


class QuantEmbedding(QuantModule, nn.Embedding):
    """An embedding whose rows are dequantized as they are looked up."""

    @classmethod
    def from_parts(
        cls,
        weight: QuantWeight,
        parts: Mapping[str, Tensor],
        *,
        dtype: Optional[torch.dtype] = None,
        padding_idx: Optional[int] = None,
        hints: Optional[Mapping[str, Tensor]] = None,
        metadata: Optional[Mapping[str, str]] = None,
    ) -> QuantEmbedding:
        """A layer over packed tensors, by their names in `weight.parts`. `dtype` is that of its output, bfloat16."""
        rows, columns = _shape(weight, 2, cls)
        _refuse_transforms(weight, cls)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.num_embeddings, made.embedding_dim, made.padding_idx = rows, columns, padding_idx
        made.max_norm, made.norm_type, made.scale_grad_by_freq, made.sparse = None, 2.0, False, False
        made._set_weight(weight, parts, dtype=dtype or torch.bfloat16, hints=hints, metadata=metadata)
        return made

    def forward(self, input: Tensor) -> Tensor:
        """The rows, in the layer's type."""
        return dequantize_rows(self._quant_parts(), self.quant_text, input, self.compute_dtype)

    def extra_repr(self) -> str:
        """In words."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.format}"


class _QuantConv(QuantModule):
    """A convolution whose settings are those of the layer that it stands for."""

    _dimensions: int

    @classmethod
    def from_parts(
        cls,
        weight: QuantWeight,
        parts: Mapping[str, Tensor],
        bias: Optional[Tensor] = None,
        *,
        like: nn.Module,
        dtype: Optional[torch.dtype] = None,
        hints: Optional[Mapping[str, Tensor]] = None,
        metadata: Optional[Mapping[str, str]] = None,
    ) -> Any:
        """A layer over packed tensors, with stride, padding, dilation and groups of the convolution `like`."""
        _shape(weight, cls._dimensions + 2, cls)
        _refuse_transforms(weight, cls)
        if tuple(weight.shape) != tuple(like.weight.shape):
            raise QuantizationError(
                f"{weight.name} has the shape {weight.shape}, and the convolution's is {list(like.weight.shape)}"
            )
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        for name in (
            "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "transposed",
            "output_padding", "groups", "padding_mode", "_reversed_padding_repeated_twice",
        ):  # fmt: skip
            setattr(made, name, getattr(like, name))
        made._set_weight(weight, parts, dtype=dtype or torch.bfloat16, hints=hints, metadata=metadata)
        made.register_parameter("bias", _bias(bias))
        return made

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output, in the type of its inputs or of autocast."""
        dtype = self._compute_type(input)
        bias = self.bias
        if bias is not None and bias.dtype != dtype:
            bias = bias.to(dtype)
        return self._conv_forward(input.to(dtype), self._numbers(dtype), bias)

    def extra_repr(self) -> str:
        """In words."""
        shape = described(self.quant_text).shape
        return f"{list(shape)}, stride={self.stride}, padding={self.padding}, {self.format}"


class QuantConv1d(_QuantConv, nn.Conv1d):
    """A one-dimensional convolution with a quantized weight."""

    _dimensions = 1


class QuantConv2d(_QuantConv, nn.Conv2d):
    """A two-dimensional convolution with a quantized weight."""

    _dimensions = 2


class QuantConv3d(_QuantConv, nn.Conv3d):
    """A three-dimensional convolution with a quantized weight."""

    _dimensions = 3


_KINDS: tuple[tuple[type[nn.Module], type[QuantModule]], ...] = (
    (nn.Linear, QuantLinear),
    (nn.Embedding, QuantEmbedding),
    (nn.Conv1d, QuantConv1d),
    (nn.Conv2d, QuantConv2d),
    (nn.Conv3d, QuantConv3d),
)


@lru_cache(maxsize=None)
def quant_class(cls: type[nn.Module]) -> Optional[type[QuantModule]]:
    """The quantized layer for a class of layers; None if there is none.

    A subclass with a forward of its own keeps it: what it calls of its base is the quantized layer's.
    """
    for base, quant in _KINDS:
        if cls is base:
            return quant
        if issubclass(cls, base):
            own = {"__doc__": quant.__doc__, "__module__": cls.__module__, "__reduce_ex__": _reduce_ex}
            return type(f"Quant{cls.__name__}", (cls, quant), own)
    return None


def _reduce_ex(self: QuantModule, protocol: Any) -> Any:
    """As of any object, but by the class that it was made of: pickles find classes by their names, and made ones are in no module."""
    made = next(one for one in type(self).__mro__ if one.__dict__.get("__reduce_ex__") is _reduce_ex)
    reduced = super(made, self).__reduce_ex__(protocol)
    if type(self) is made and isinstance(reduced, tuple) and reduced[:2] == (copyreg.__newobj__, (made,)):  # type: ignore[attr-defined]
        return (_blank, (made.__bases__[0],), *reduced[2:])
    return reduced


def _blank(cls: type[nn.Module]) -> Any:
    """A layer of the class made of `cls`, which what was pickled fills."""
    made = quant_class(cls)
    if made is None:
        raise QuantizationError(f"there is no quantized {cls.__name__}")
    return made.__new__(made)
