"""Quantized weights on their way into a model: recognised in each source, followed through renames, put into layers.

read          recognise     what the files' structure and metadata say, by the tensors themselves
rename        gather        the same tensors under other names make the same weights
              leftover      what a caller's functions made anew is looked at again
split         split_packed  rows of packed matrices, where their layout allows it
apply         applying.py   layers that compute with packed weights; numbers for every other place
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ..errors import QuantizationError
from ..quant.finding import Packed
from ..quant.ops import dequantize
from ..quant.rows import take_rows
from ..quant_router.merging import Foreign, understand
from .sources import Source

__all__ = ["Entry", "gather", "leftover", "numbers_of", "recognise"]

Entry = Union[Tensor, Packed]
"""A weight that a model may want: numbers, or packed."""


def recognise(source: Source, default_dtype: Optional[torch.dtype]) -> None:
    """Notes what of a source is quantized. What is not understood may yet be left out: `leftover` asks again."""
    try:
        found = understand(source.sd, source.metadata, source.quantization_map, default_dtype)
    except QuantizationError:
        source.unclear = True
        return
    source.packed = list(found.packed.values())
    source.notes += found.notes
    if found.foreign:
        source.foreign = dict(found.foreign)
        source.sd = {
            **found.plain,
            **{
                f"{packed.name.rpartition('.')[0]}.{name}".lstrip("."): part
                for packed in source.packed
                for name, part in packed.parts.items()
            },
            **{
                f"{module}.{name}".lstrip("."): tensor
                for module, one in found.foreign.items()
                for name, tensor in one.tensors.items()
            },
        }


def gather(sd: Mapping[str, Tensor], source: Source) -> tuple[dict[str, Entry], dict[str, Foreign]]:
    """The weights of a source under the names that its tensors have now; apart, the modules of an application's formats."""
    known: dict[int, list[tuple[Packed, str, bool]]] = {}
    for packed in source.packed:
        for number, (_, tensor, *_) in enumerate(packed.weight.parts):
            known.setdefault(id(packed.parts[tensor]), []).append((packed, tensor, number == 0))
    hints = {id(hint) for packed in source.packed for hint in packed.hints.values()}
    entries: dict[str, Entry] = {}
    used: set[str] = set()
    for name, tensor in sd.items():
        for packed, local, first in known.get(id(tensor), ()):
            start = name.removesuffix(local) if first and name.endswith(local) else None
            if start is None or (start and not start.endswith(".")):
                continue
            if all(sd.get(start + other) is part for other, part in packed.parts.items()):
                used.update(start + other for other in packed.parts)
                weight = start + packed.weight.name
                entries[weight] = Packed(
                    weight, packed.weight, packed.parts, packed.handler, packed.hints, packed.metadata
                )
                break
    foreign: dict[str, Foreign] = {}
    for one in source.foreign.values():
        ids = {id(tensor): local for local, tensor in one.tensors.items()}
        for name, tensor in sd.items():
            local = ids.get(id(tensor))
            if local is None or name in used or not name.endswith(local):
                continue
            start = name[: len(name) - len(local)]
            if all(sd.get(start + other) is part for other, part in one.tensors.items()):
                used.update(start + other for other in one.tensors)
                foreign[start.rstrip(".")] = one
    for name, tensor in sd.items():
        if name not in used and id(tensor) not in hints:
            entries[name] = tensor
    return entries, foreign


_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def leftover(
    entries: dict[str, Entry],
    expected: Mapping[str, Tensor],
    quantization_map: Optional[Mapping[str, Any]],
    metadata: Optional[Mapping[str, str]],
) -> dict[str, Entry]:
    """The same, with what still is quantized among the plain tensors packed. QuantizationError for what is not understood.

    What the model itself calls so, and has in that type, is left alone: its own code knows what it means.
    """
    plain = {
        name: tensor
        for name, tensor in entries.items()
        if isinstance(tensor, Tensor) and not _the_models_own(name, tensor, expected)
    }
    packed = {name for name, entry in entries.items() if isinstance(entry, Packed)}
    quantization_map = {
        name: entry for name, entry in (quantization_map or {}).items() if not {name, f"{name}.weight"} & packed
    }
    found = understand(plain, metadata, quantization_map)
    if found.foreign:
        name = next(iter(found.foreign))
        raise QuantizationError(f"{name} is of an application's format, made by a function that renames weights")
    kept = {name: entry for name, entry in entries.items() if name not in plain or name in found.plain}
    return {**kept, **found.packed}


def _the_models_own(name: str, tensor: Tensor, expected: Mapping[str, Tensor]) -> bool:
    if name not in expected or expected[name].dtype != tensor.dtype:
        return False
    # Ordinary weights are looked at too: the file may say that they are quantized.
    return not (name.rpartition(".")[2] == "weight" and tensor.dtype in _FLOATS)


def split_packed(packed: Packed, names: list[str], sizes: list[int]) -> dict[str, Entry]:
    """A fused matrix as its parts: packed where rows lie apart, as numbers otherwise."""
    result: dict[str, Entry] = {}
    start = 0
    for name, size in zip(names, sizes):
        rows = take_rows(packed, slice(start, start + size), name)
        if rows is None:
            # Rows share bytes in this format: numbers, of which each part takes its own.
            numbers = numbers_of(packed, torch.float32)
            return dict(zip(names, numbers.split(sizes)))
        result[name] = rows
        start += size
    return result


def numbers_of(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The weight as plain numbers, as inputs meet them that nobody has transformed."""
    packed.check()
    if packed.weight.transforms:
        from ..quant.layers import QuantLinear

        layer = QuantLinear.from_parts(packed.weight, packed.parts, dtype=dtype)
        return layer.weight.numbers()
    parts = [packed.parts[tensor] for _, tensor, *_ in packed.weight.parts]
    return dequantize(packed.weight, parts, dtype)
