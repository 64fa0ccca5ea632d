"""What a file's metadata says of a model: its configuration, which modules are quantized, which names are tied.

Written as base64 of JSON under `config_base64`, `quantization_map_base64` and `tied_weights_map_base64`, as other tools
write and read them. It is text of strangers: it is checked for its form, and never runs or names a path to open.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from typing import Any, Optional

from ..errors import CheckpointError

__all__ = [
    "broken_entries",
    "config_of",
    "encoded",
    "quantization_config_beside",
    "quantization_map_of",
    "sibling_map",
    "tied_map_of",
]

_SUFFIX = "_base64"
_MODELOPT = {"quant_method": "modelopt"}
"""Whose file `hf_quant_config.json` is."""
_MOST_BYTES = 64 << 20
"""Of a JSON file beside a checkpoint."""


def encoded(**entries: Any) -> dict[str, str]:
    """Metadata entries for what is not empty; `quantization_format` says how a quantization map is meant."""
    return {
        name + _SUFFIX: base64.b64encode(json.dumps(value, default=str).encode()).decode()
        for name, value in entries.items()
        if value
    }


def config_of(metadata: Mapping[str, str], source: str) -> Optional[dict[str, Any]]:
    """The model's configuration, or None."""
    return _mapping(metadata, "config", source)


def quantization_map_of(metadata: Mapping[str, str], source: str) -> Optional[dict[str, Any]]:
    """Module name → how it is quantized, or None."""
    return _mapping(metadata, "quantization_map", source)


def tied_map_of(metadata: Mapping[str, str], source: str) -> Optional[dict[str, list[str]]]:
    """The name that is stored → the other names of the same weight, or None."""
    tied = _mapping(metadata, "tied_weights_map", source)
    for kept, aliases in (tied or {}).items():
        if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
            raise CheckpointError(f"{source}: tied_weights_map in its metadata gives no list of names for {kept!r}")
    return tied


def broken_entries(metadata: Mapping[str, str], source: str) -> dict[str, str]:
    """What is wrong with entries that plain weights can do without: the configuration and the map of tied weights, by name.

    Who needs one of them is told of it as an error. Plain text under `config` may be anybody's remark and is none of these.
    """
    found: dict[str, str] = {}
    for name, read in (("config", config_of), ("tied_weights_map", tied_map_of)):
        if name == "config" and name + _SUFFIX not in metadata:
            continue
        try:
            read(metadata, source)
        except CheckpointError as error:
            found[name] = str(error)
    return found


def sibling_map(path: str) -> Optional[dict[str, Any]]:
    """The quantization map in `<file>_map.json` beside a file without one of its own, or None."""
    beside = os.path.splitext(path)[0] + "_map.json"
    return read_json(beside) if os.path.isfile(beside) else None


def quantization_config_beside(path: str) -> Optional[str]:
    """What the configuration in a file's folder says of quantization, as JSON; None if there is none, or it cannot be read.

    Some layouts are said nowhere else: which half of a byte is first, and whether zero points are stored less one.
    """
    folder = os.path.dirname(os.path.abspath(path))
    for name, key, method in (
        ("config.json", "quantization_config", {}),
        ("hf_quant_config.json", "quantization", _MODELOPT),
    ):
        if os.path.isfile(os.path.join(folder, name)):
            try:
                found = read_json(os.path.join(folder, name)).get(key)
            except CheckpointError:
                continue  # whoever needs the configuration says what is wrong with it
            if isinstance(found, dict):
                return json.dumps({**method, **found})
    return None


def read_json(path: str) -> dict[str, Any]:
    """The object in a JSON file. CheckpointError if it is none, or larger than anything of its kind."""
    try:
        size = os.path.getsize(path)
        if size > _MOST_BYTES:
            raise CheckpointError(f"{path} has {size} bytes; at most {_MOST_BYTES} are read of a JSON file")
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, where an object is due")
    return value


def _mapping(metadata: Mapping[str, str], name: str, source: str) -> Optional[dict[str, Any]]:
    key = name + _SUFFIX if name + _SUFFIX in metadata else name
    text = metadata.get(key)
    try:
        if text is not None and key != name:
            text = base64.b64decode(text, validate=True).decode()
        value = json.loads(text) if text else None
    except (binascii.Error, ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: {key} in its metadata cannot be read: {error}") from None
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(
            f"{source}: {key} in its metadata is a JSON {type(value).__name__}, where an object is due"
        )
    return value
