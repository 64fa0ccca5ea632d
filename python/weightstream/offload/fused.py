"""Splits weights that a checkpoint keeps fused (query, key and value in one matrix) for models that have them apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from ..errors import WeightsError
from ..quant.finding import Packed
from .quantized import Entry, split_packed

__all__ = ["split_fused"]


def split_fused(
    sd: dict[str, Entry], split_map: Optional[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Entry]:
    """Replaces each fused module's tensors by parts of them, as views along the first dimension.

    split_map: {"qkv": {"mapped_modules": ["q", "k", "v"], "split_sizes": [n, n, n]}}. The key is a module's name, or the
        end of it from a dot on. Without sizes, those of the model's own parameters are taken.
    shapes: of the model's parameters, by name.

    WeightsError, naming the module, if the sizes do not add up to what is there.
    """
    if not split_map:
        return sd
    result: dict[str, Entry] = {}
    for name, tensor in sd.items():
        module, _, leaf = name.rpartition(".")
        found = next((key for key in split_map if module == key or module.endswith("." + key)), None)
        if found is None or name in shapes:
            result[name] = tensor
            continue
        base = module[: len(module) - len(found)]
        parts, sizes = _parts(found, split_map[found])
        names = [f"{base}{part}.{leaf}" for part in parts]
        if len(tensor.shape) == 0:
            result.update(dict.fromkeys(names, tensor))
            continue
        sizes = sizes or _sizes_of(name, names, shapes)
        if sum(sizes) != tensor.shape[0]:
            raise WeightsError(
                f"{name} has {tensor.shape[0]} rows and is to be split into {' + '.join(map(str, sizes))} = {sum(sizes)}, "
                f"for {', '.join(parts)}"
            )
        pieces = split_packed(tensor, names, sizes) if isinstance(tensor, Packed) else zip(names, tensor.split(sizes))
        for part, rows in dict(pieces).items():
            if part in sd:
                raise WeightsError(f"{name} is to be split, and {part} is in the checkpoint already")
            result[part] = rows
    return result


def _parts(key: str, entry: Any) -> tuple[list[str], Optional[list[int]]]:
    if isinstance(entry, Mapping):
        parts, sizes = entry.get("mapped_modules"), entry.get("split_sizes")
    else:
        parts, sizes = entry, None
    if not isinstance(parts, (list, tuple)) or not parts or not all(isinstance(part, str) for part in parts):
        raise WeightsError(f'fused_split_map has no list of module names under "mapped_modules" for {key}')
    if sizes is None:
        return list(parts), None
    if len(sizes) != len(parts) or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise WeightsError(f"fused_split_map gives {key} the sizes {sizes!r} for {len(parts)} modules")
    return list(parts), list(sizes)


def _sizes_of(name: str, parts: list[str], shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    missing = [part for part in parts if not shapes.get(part)]
    if missing:
        raise WeightsError(
            f"{name} is to be split without sizes, and the model has no {missing[0]} to take its size from"
        )
    return [shapes[part][0] for part in parts]
