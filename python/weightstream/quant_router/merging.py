"""What is quantized in a model, by the built-in formats and an application's handlers as one list.

    header  ──► each handler's detect            no data: tensors on the meta device
    tensors ──► convert_to_quanto of those that match, the best first
    module  ──► the handler with the smallest priority that has it; the others' tensors of it are left out

What a handler makes of a module is then read by the built-in formats if it is one of theirs (quanto's), and computed by the
handler's own layer otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor

from .. import _native
from ..errors import QuantizationError
from ..quant.finding import Packed, find, header_of, metadata_of, reader_of
from .calling import call
from .registry import Registered, registered, replaced

__all__ = ["Foreign", "Understood", "understand"]


@dataclass(eq=False)
class Foreign:
    """A module whose weight is of an application's own format."""

    handler: Registered
    kind: Any
    """The type that the handler's map names."""
    tensors: dict[str, Tensor]
    """By their names in the module."""


@dataclass(eq=False)
class Understood:
    """What a model's tensors are."""

    packed: dict[str, Packed]
    """Quantized weights of built-in formats, by the weight's name."""
    foreign: dict[str, Foreign]
    """Those of an application's, by the module's name."""
    plain: dict[str, Tensor]
    """Everything else."""
    notes: list[str] = field(default_factory=list)


def understand(
    sd: Mapping[str, Tensor],
    metadata: Optional[Mapping[str, str]] = None,
    quantization_map: Optional[Mapping[str, Any]] = None,
    default_dtype: Optional[torch.dtype] = None,
    verbose: int = -1,
) -> Understood:
    """Finds the quantized weights. QuantizationError, naming the layer, for what nobody understands."""
    own = registered()
    without = replaced()
    if not own:
        found = find(sd, metadata, quantization_map)
        return Understood(found.packed, {}, found.plain, found.notes)
    rest, converted, foreign, maps = _asked(sd, metadata, quantization_map, default_dtype, verbose, own, without)
    for module, one in list(foreign.items()):
        named = {f"{module}.{name}" if module else name: tensor for name, tensor in one.tensors.items()}
        if _is_quantos(one, named, module):
            rest.update(named)
            maps[module] = {"weights": str(getattr(one.kind, "name", one.kind)), "activations": "none"}
            del foreign[module]
    rest.update(converted)
    # The file's own map speaks of modules that are the handlers' now.
    kept = {name: entry for name, entry in (quantization_map or {}).items() if not _within(name, foreign)}
    found = find(rest, metadata, {**kept, **maps} or None, without)
    for name in [name for name in found.plain if _within(name, foreign)]:
        del found.plain[name]
    return Understood(found.packed, foreign, found.plain, found.notes)


def _asked(
    sd: Mapping[str, Tensor],
    metadata: Optional[Mapping[str, str]],
    quantization_map: Optional[Mapping[str, Any]],
    default_dtype: Optional[torch.dtype],
    verbose: int,
    own: list[Registered],
    without: list[str],
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Foreign], dict[str, Any]]:
    """What no handler took, what they made of plain tensors, the modules they took, and an empty map."""
    shown = {name: torch.empty_like(tensor, device="meta") for name, tensor in sd.items()}
    texts = dict(metadata or {})
    claims = _native.quant_claims(header_of(sd), metadata_of(metadata, quantization_map), reader_of(sd), without)
    native = {name.rpartition(".")[0]: priority for name, (_, priority) in claims.items()}
    rest, converted, foreign = dict(sd), {}, {}
    for one in own:
        detection = call(
            one.name, one.module.detect, [dict(shown)], {"verboseLevel": verbose, "metadata": texts}, "detect"
        )
        detection = detection if isinstance(detection, Mapping) else {"matched": bool(detection)}
        if not detection.get("matched"):
            continue
        made = call(
            one.name,
            one.module.convert_to_quanto,
            [dict(sd)],
            {"default_dtype": default_dtype, "verboseLevel": verbose, "detection": dict(detection), "metadata": texts},
            "convert_to_quanto",
        )
        if not isinstance(made, Mapping) or not isinstance(made.get("state_dict"), Mapping):
            raise QuantizationError(f"convert_to_quanto of the handler {one.name} gives no state_dict")
        state, quant_map = made["state_dict"], dict(made.get("quant_map") or {})
        taken = {
            module
            for module in quant_map
            if module not in foreign and native.get(module, one.priority + 1) > one.priority
        }
        for module in taken:
            start = module + "." if module else ""
            tensors = {name[len(start) :]: tensor for name, tensor in state.items() if name.startswith(start)}
            if not tensors:
                raise QuantizationError(
                    f"the handler {one.name} has the module {module!r} in its map and no tensor of it"
                )
            entry = quant_map[module]
            kind = entry.get("weights") if isinstance(entry, Mapping) else entry
            foreign[module] = Foreign(one, kind, tensors)
            for name in [name for name in rest if name.startswith(start)]:
                del rest[name]
        if taken:
            for name in [name for name in rest if name not in state and not _claimed(name, native)]:
                del rest[name]  # markers that the conversion used up
            for name, tensor in state.items():
                if not _within(name, {**foreign, **native}) and sd.get(name) is not tensor:
                    rest.pop(name, None)
                    converted.setdefault(name, tensor)
    return rest, converted, foreign, {}


def _claimed(name: str, modules: Mapping[str, Any]) -> bool:
    return _within(name, modules)


def _within(name: str, modules: Mapping[str, Any]) -> bool:
    """Whether a tensor or module lies in one of these modules."""
    while True:
        if name in modules:
            return True
        if "." not in name:
            return False
        name = name.rpartition(".")[0]


def _is_quantos(one: Foreign, named: Mapping[str, Tensor], module: str) -> bool:
    """Whether the tensors are laid out as optimum-quanto does, so that our own layers compute with them."""
    kind = str(getattr(one.kind, "name", one.kind))
    if kind not in ("qint8", "qint4", "qint2", "qfloat8", "qfloat8_e4m3fn", "qfloat8_e5m2"):
        return False
    weight = f"{module}.weight" if module else "weight"
    return any(name.startswith(f"{weight}._data") for name in named) and f"{weight}._scale" in named
