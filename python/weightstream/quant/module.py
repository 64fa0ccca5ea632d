"""What all quantized layers are: packed tensors registered as parameters, their description, and how they are kept.

    parameter       quant_data, quant_scale, …   a part of the weight by its role; floating-point parts as their bytes
    state_dict()    weight, weight_scale, …      the parts under their names in the file, in its types

so that `attach` streams the packed bytes, `.to(dtype)` leaves them alone, and what is saved is what was loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .._native import QuantWeight
from ..errors import QuantizationError, StateError
from ..filetypes import dtype_of_name
from ..guard import ManagedParameter
from .description import as_bytes, described, local, restored
from .lazy import LazyWeight
from .ops import dequantize_parts, rotate

__all__ = ["QuantModule", "attribute_of"]


def attribute_of(role: str) -> str:
    """The parameter that holds the part of a role: `GlobalScale` in `quant_global_scale`."""
    return "quant_" + re.sub(r"(?<!^)(?=[A-Z])", "_", role).lower()


class QuantModule(nn.Module):
    """A layer whose weight is quantized: the base of all of them."""

    quant_text: str
    """The weight's description, as operators take it."""
    quant_hints: dict[str, Tensor]
    """What else the file has for the layer: markers and ranges of inputs, by name in the layer. Never moved."""
    quant_metadata: dict[str, str]
    """What the file's metadata says of the weight, by name in the layer."""
    compute_dtype: torch.dtype
    """The type that the weight's numbers have for who asks."""

    def _set_weight(
        self,
        weight: QuantWeight,
        parts: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        hints: Optional[Mapping[str, Tensor]] = None,
        metadata: Optional[Mapping[str, str]] = None,
    ) -> None:
        """Registers the parts. QuantizationError for others than the weight describes, of other sizes, or that index what there is not."""
        start = weight.name.rpartition(".")[0]
        start = start + "." if start else ""
        named = {name.removeprefix(start): tensor for name, tensor in parts.items()}
        known = described(local(weight).to_json())
        missing = [name for name in known.tensors if name not in named]
        if missing or len(named) != len(known.tensors):
            raise QuantizationError(f"{weight.name} is made of {known.tensors}, and {sorted(named)} were given")
        self.quant_text = known.text
        self.compute_dtype = dtype
        self.quant_hints = {name.removeprefix(start): hint for name, hint in (hints or {}).items()}
        self.quant_metadata = {name.removeprefix(start): text for name, text in (metadata or {}).items()}
        self._quant_remember()
        for role, name in zip(known.roles, known.tensors):
            # A part that is a parameter already, as those of a tied layer, stays the same object.
            given = named[name]
            part = given if isinstance(given, nn.Parameter) and not given.is_floating_point() else None
            part = part if part is not None else nn.Parameter(as_bytes(given), requires_grad=False)
            self.register_parameter(attribute_of(role), part)
        described(self.quant_text).check(self._quant_parts(), weight.name)

    def _quant_remember(self) -> None:
        """Keeps what forwards need as plain values, which the compiler can read."""
        known = described(self.quant_text)
        self._quant_names = tuple(map(attribute_of, known.roles))
        self._quant_steps = tuple(known.weight.transforms)
        self._quant_factor: Optional[tuple[torch.dtype, int]] = None
        if "InputFactor" in known.roles:
            at = known.roles.index("InputFactor")
            self._quant_factor = (dtype_of_name(known.kinds[at]) or torch.float32, known.columns)

    @property
    def quant_weight(self) -> QuantWeight:
        """The weight's description, by its names in the layer."""
        return described(self.quant_text).weight

    @property
    def format(self) -> str:
        """How the weight is packed, in words."""
        return described(self.quant_text).weight.format

    def quant_parts(self) -> dict[str, Tensor]:
        """The parts as the file has them, by their names in it."""
        known = described(self.quant_text)
        parts = self._quant_parts()
        return {
            name: restored(part.detach(), kind, shape)
            for name, part, kind, shape in zip(known.tensors, parts, known.kinds, known.shapes)
        }

    def _quant_parts(self) -> list[Tensor]:
        return [self._parameters[name] for name in self._quant_names]

    def _numbers(self, dtype: torch.dtype) -> Tensor:
        """The weight in a forward, whose turn has brought its bytes."""
        return dequantize_parts(self._quant_parts(), self.quant_text, dtype)

    @property
    def weight(self) -> Tensor:
        """The weight's numbers. Type, shape and device cost nothing; each operator that reads it dequantizes it anew."""
        if torch.compiler.is_compiling():
            return self._effective(self._quant_parts(), self.compute_dtype)
        device = self._quant_parts()[0].device

        def read(dtype: torch.dtype) -> Tensor:
            # At any time, also when the memory behind managed parameters holds other bytes.
            with torch.no_grad():
                return self._effective([part.detach() for part in self._quant_parts()], dtype)

        return LazyWeight(self, torch.Size(self.quant_weight.shape), self.compute_dtype, device, read)

    def _effective(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        """The numbers that inputs meet which nobody has transformed: turned back, and multiplied as inputs would be."""
        if not self._quant_steps:
            return dequantize_parts(parts, self.quant_text, dtype)
        numbers = dequantize_parts(parts, self.quant_text, torch.float32)
        factor = parts[self._quant_names.index("quant_input_factor")] if self._quant_factor is not None else None
        return self._stepped(numbers, reversed(self._quant_steps), factor).to(dtype)

    @weight.setter
    def weight(self, value: Any) -> None:
        self._assign_weight(value)

    def _assign_weight(self, value: Any) -> None:
        """Ties this weight to another layer's. StateError for anything else."""
        layer = value.layer if isinstance(value, LazyWeight) else None
        if layer is None or described(layer.quant_text).shape != described(self.quant_text).shape:
            raise StateError(
                f"the weight of a {type(self).__name__} can only be that of another quantized layer of its shape, not a "
                f"{type(value).__name__}: put a layer of floats in its place"
            )
        if layer is self:
            return
        for name in self._quant_names:
            del self._parameters[name]
        for name in ("quant_text", "quant_hints", "quant_metadata"):
            setattr(self, name, getattr(layer, name))
        self._quant_remember()
        for name in self._quant_names:
            self.register_parameter(name, layer._parameters[name])

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self._assign_weight(value)
        else:
            super().__setattr__(name, value)

    def _compute_type(self, input: Tensor) -> torch.dtype:
        """The type to compute in: autocast's, else that of the inputs."""
        kind = input.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return input.dtype

    def _transformed(self, input: Tensor) -> Tensor:
        """Inputs as the weight's own numbers meet them."""
        if not self._quant_steps:
            return input
        return self._stepped(input, self._quant_steps, self._parameters.get("quant_input_factor"))

    def _stepped(self, input: Tensor, steps: Iterable[tuple[str, int]], factor: Optional[Tensor]) -> Tensor:
        for kind, group in steps:
            if kind == "Hadamard":
                input = rotate(input, group)
            elif kind == "Multiply" and factor is not None and self._quant_factor is not None:
                dtype, columns = self._quant_factor
                input = input * factor.view(dtype).view(columns).to(input.dtype)
            else:
                raise QuantizationError(f"inputs of {self.format} want {kind}, which is not known here")
        return input

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Parts hold no floats, so only the type to compute in follows `.to(dtype)`.
        probe = fn(torch.empty(0, dtype=self.compute_dtype))
        if probe.is_floating_point():
            self.compute_dtype = probe.dtype
        return super()._apply(fn, recurse)

    def _quant_refusal(self, state_dict: Mapping[str, Any], prefix: str) -> Optional[str]:
        """Why parts that fit the layer one by one are no weight together: an index of groups that there are not. None if they are."""
        known = described(self.quant_text)
        if "GroupIndex" not in known.roles or any(prefix + name not in state_dict for name in known.tensors):
            return None
        parts = [as_bytes(state_dict[prefix + name]) for name in known.tensors]
        if any(part.nbytes != own.nbytes for part, own in zip(parts, self._quant_parts())):
            return None  # said of the part itself
        try:
            known.check(parts, f"{prefix}weight")
        except QuantizationError as error:
            return str(error)
        return None

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        known = described(self.quant_text)
        for part, name, kind, shape in zip(self._quant_parts(), known.tensors, known.kinds, known.shapes):
            if isinstance(part, ManagedParameter) and not keep_vars:
                part = part._weightstream.host
            destination[prefix + name] = restored(part if keep_vars else part.detach(), kind, shape)
            blocks = (kind, tuple(shape), part.nbytes)
            if known.blocks is not None:
                destination[prefix + name] = destination[prefix + name].view(part.shape)
                destination[prefix + name]._weightstream_blocks = blocks
        for name, hint in self.quant_hints.items():
            destination[prefix + name] = hint
        bias = self._parameters.get("bias")
        if bias is not None:
            if isinstance(bias, ManagedParameter) and not keep_vars:
                bias = bias._weightstream.host
            destination[prefix + "bias"] = bias if keep_vars else bias.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        known = described(self.quant_text)
        assign = local_metadata.get("assign_to_params_buffers", False)
        rows = list(zip(known.roles, known.tensors, known.kinds, known.shapes))
        refused = self._quant_refusal(state_dict, prefix)
        if refused is not None:
            error_msgs.append(refused)
            rows = []
        for role, name, kind, shape in rows:
            given = state_dict.get(prefix + name)
            own = self._parameters[attribute_of(role)]
            if given is None:
                missing_keys.append(prefix + name)
                continue
            part = as_bytes(given)
            if part.nbytes != own.nbytes or part.dtype != own.dtype:
                error_msgs.append(
                    f"{prefix}{name} is {given.dtype} {list(given.shape)}, and the layer has it as {kind} {list(shape)}"
                )
            elif assign:
                self.register_parameter(attribute_of(role), nn.Parameter(part.view(own.shape), requires_grad=False))
            else:
                with torch.no_grad():
                    own.copy_(part.view(own.shape))
        for name in self.quant_hints:
            self.quant_hints[name] = state_dict.get(prefix + name, self.quant_hints[name])
        bias = self._parameters.get("bias")
        given = state_dict.get(prefix + "bias")
        if bias is not None and given is None:
            missing_keys.append(prefix + "bias")
        elif bias is not None and given.shape != bias.shape:
            error_msgs.append(f"{prefix}bias has the shape {list(given.shape)}, and the layer's {list(bias.shape)}")
        elif bias is not None and assign:
            self.bias = given if isinstance(given, nn.Parameter) else nn.Parameter(given, bias.requires_grad)
        elif bias is not None:
            with torch.no_grad():
                bias.copy_(given)
        if strict:
            own_names = {*known.tensors, *self.quant_hints, "bias"}
            for name in state_dict:
                if name.startswith(prefix) and name[len(prefix) :] not in own_names:
                    unexpected_keys.append(name)
