"""What of a model adapters may change: its layers by name, kind and weight shape, and how each of them is computed.

Reads the module tree and changes nothing. PEFT's own layers count under the name of the layer that they wrap; what they
add to it is no layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Optional

import torch
from torch import nn

from ..calls import LEAVES
from ..quant.layers import QuantEmbedding
from ..quant.module import QuantModule
from .numbers import is_computed, is_plain

__all__ = ["AdaptedLayer", "compute_dtype", "layers_of"]

_CONVOLUTIONS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.Conv1d, "conv1d"),
    (nn.Conv2d, "conv2d"),
    (nn.Conv3d, "conv3d"),
)
_PRODUCTS: dict[str, tuple[object, ...]] = {
    "linear": (nn.Linear.forward,),
    "conv1d": (nn.Conv1d.forward,),
    "conv2d": (nn.Conv2d.forward,),
    "conv3d": (nn.Conv3d.forward,),
}
"""The forwards that multiply by the weight and do nothing else."""
_OF_INPUTS = ("oft_inputs", "boft_inputs", "glora")
_ROTATIONS = ("oft_inputs", "boft_inputs")
_COMPUTED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The types that PyTorch multiplies in."""


@dataclass(frozen=True, eq=False)
class AdaptedLayer:
    """One layer, or a parameter that no layer owns."""

    name: str
    """As adapters name it."""
    kind: str
    """As the native plan names kinds: linear, conv1d, conv2d, conv3d, norm, embedding, parameter, other."""
    shape: tuple[int, ...]
    """Of its weight; of a parameter, its own."""
    module: nn.Module
    """The layer, or what owns the parameter."""
    parameter: str
    """The attribute that holds the weight."""
    leaf: Optional[nn.Module] = None
    """The module around it that hands its weights to one operator, past its forward."""
    is_transposed: bool = False
    """Whether the module keeps the weight as inputs by outputs."""

    @property
    def described_kind(self) -> str:
        """Its kind for the native plan, which tells apart how differences to it are laid out."""
        return f"{self.kind}_transposed" if self.is_transposed else self.kind

    @property
    def has_bias(self) -> bool:
        """Whether there is a bias to change."""
        return self.kind != "parameter" and isinstance(getattr(self.module, "bias", None), torch.Tensor)

    @property
    def is_quantized(self) -> bool:
        """Whether the weight is no plain tensor of numbers."""
        weight = self.module._parameters.get(self.parameter)
        return weight is None or not is_plain(weight) or not weight.is_floating_point()

    @property
    def is_swapped(self) -> bool:
        """Whether adapters are added to its weight for the time of a forward, and not beside it."""
        return self.leaf is not None or self.kind in ("norm", "parameter", "other") or self._computes_otherwise()

    def _computes_otherwise(self) -> bool:
        """Whether it makes something else of its weight and inputs than their product, as causal convolutions do, which pad.
        Packed weights are told by their package's layers, whose forward is that product."""
        if self.kind not in _PRODUCTS or self.is_transposed or type(self.module).forward in _PRODUCTS[self.kind]:
            return False
        weight = self.module._parameters.get(self.parameter)
        return weight is not None and is_plain(weight) and weight.dtype in _COMPUTED

    def refusal(self, kind: str, axis: Optional[int] = None) -> Optional[str]:
        """Why an adapter of a kind, with numbers along an axis, cannot be computed on it; None if it can."""
        if isinstance(self.leaf, nn.RNNBase):
            return f"a {type(self.leaf).__name__} keeps its weights in a list of its own, which adapters cannot change"
        if self.kind == "embedding" and type(self.module).forward not in (nn.Embedding.forward, QuantEmbedding.forward):
            return "it is an embedding with a forward of its own, which an adapter cannot be added to"
        if (kind in _OF_INPUTS or (kind == "ia3" and axis == 1)) and getattr(self.module, "groups", 1) != 1:
            return "it is a convolution in groups, and the adapter changes inputs of all of them together"
        if kind in _ROTATIONS and any(size != 1 for size in self.shape[2:]):
            refusal = self._filter_refusal()
            if refusal is not None:
                return refusal
        if self.kind in _PRODUCTS and is_computed(self.module):
            if self.leaf is not None or type(self.module).forward not in _PRODUCTS[self.kind]:
                return "its weight is computed by a parametrization, and its forward is its own: there is no parameter to change"
        if self.is_swapped and kind != "diff_bias" and self.is_quantized:
            return "its weight is packed, and the module around it reads it past the layer's forward"
        return None

    def _filter_refusal(self) -> Optional[str]:
        """Why a rotation of its filter's inputs, as PEFT has it, has no meaning for it; None if it has one."""
        module = self.module
        alike = isinstance(module.padding, tuple) and len(set(module.padding)) == len(set(module.stride)) == 1
        if alike and module.padding_mode == "zeros" and set(module.dilation) == {1}:
            return None
        return (
            f"it is a convolution of stride {module.stride}, padding {module.padding} ({module.padding_mode}) and dilation "
            f"{module.dilation}, which PEFT computes as another one where it rotates the inputs of filters, and merges as this one"
        )

    @property
    def dtype(self) -> torch.dtype:
        """The type that its adapters' tensors are kept in."""
        return compute_dtype(self.module, self.parameter)


def compute_dtype(module: nn.Module, parameter: str = "weight") -> torch.dtype:
    """The type that a module computes in as far as its weights tell: bfloat16 where they are of none that multiplies."""
    if isinstance(module, QuantModule):
        return module.compute_dtype
    weight = getattr(module, parameter, None)
    dtype = getattr(weight, "dtype", None)
    if dtype in _COMPUTED:
        return dtype
    bias = getattr(module, "bias", None)
    dtype = getattr(bias, "dtype", None) or getattr(module, "compute_dtype", None)
    return dtype if dtype in _COMPUTED else torch.bfloat16


def layers_of(model: nn.Module, within: Optional[Iterable[nn.Module]] = None) -> Iterator[AdaptedLayer]:
    """All layers of a model by the names that they have in it; of the models `within` it alone, if given."""
    allowed = None if within is None else {id(module) for part in within for module in part.modules()}
    seen: set[int] = set()

    def walk(module: nn.Module, name: str, leaf: Optional[nn.Module]) -> Iterator[AdaptedLayer]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if leaf is None and isinstance(module, LEAVES):
            leaf = module
        base = module._modules.get("base_layer")
        if base is not None and hasattr(type(module), "active_adapters"):
            # A layer of PEFT's: the one inside it is the model's.
            yield from walk(base, name, leaf)
            return
        if allowed is None or id(module) in allowed:
            yield from _layers(module, name, leaf)
        for key, child in module._modules.items():
            if child is not None:
                yield from walk(child, f"{name}.{key}" if name else key, leaf)

    yield from walk(model, "", None)


def _layers(module: nn.Module, name: str, leaf: Optional[nn.Module]) -> Iterator[AdaptedLayer]:
    """The layer that a module is, if it is one, and its other parameters."""
    kind, shape, transposed = _kind(module)
    own = set()
    if kind is not None and name:
        own = {"weight", "bias"}
        yield AdaptedLayer(name, kind, shape, module, "weight", leaf, transposed)
    if isinstance(module, QuantModule):
        return
    for key, parameter in module._parameters.items():
        if parameter is not None and key not in own:
            path = f"{name}.{key}" if name else key
            yield AdaptedLayer(path, "parameter", tuple(parameter.shape), module, key, leaf)


def _kind(module: nn.Module) -> tuple[Optional[str], tuple[int, ...], bool]:
    """A module's kind as a layer, its weight's shape, and whether it is kept transposed."""
    if isinstance(module, nn.Linear):
        return "linear", (module.out_features, module.in_features), False
    if isinstance(module, nn.Embedding):
        return "embedding", (module.num_embeddings, module.embedding_dim), False
    for cls, kind in _CONVOLUTIONS:
        if isinstance(module, cls):
            return kind, (module.out_channels, module.in_channels // module.groups, *module.kernel_size), False
    sizes = [getattr(module, one, getattr(module, other, None)) for one, other in _SIZES]
    if all(isinstance(size, int) for size in sizes):
        return "linear", (sizes[0], sizes[1]), False
    weight = module._parameters.get("weight")
    if weight is None:
        return None, (), False
    if type(module).__name__ == "Conv1D" and weight.dim() == 2 and isinstance(getattr(module, "nf", None), int):
        return "linear", (weight.shape[1], weight.shape[0]), True
    return ("norm" if weight.dim() == 1 else "other"), tuple(weight.shape), False


_SIZES = (("out_features", "outfeatures"), ("in_features", "infeatures"))
"""What linear layers of quantizing libraries call their sizes."""
