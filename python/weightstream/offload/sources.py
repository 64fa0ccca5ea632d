"""What a model is loaded from: one file or several, safetensors, GGUF or pickles, or dictionaries of tensors.

Everything is gathered under names before a model is looked at: weights, which of them are quantized and tied, and the
configuration that came with them. A name that two files have is refused; the later one never wins silently.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Optional, Union

from torch import Tensor

from .._native import Checkpoint, QuantWeight
from ..errors import CheckpointError, WeightsError
from ..levels import levels_outside
from ..quant_router.calling import call
from ..quant_router.registry import extension_of, metadata_text, name_of
from ..startup.collecting import describe_checkpoint
from .metadata import (
    broken_entries,
    quantization_config_beside,
    quantization_map_of,
    read_json,
    sibling_map,
    tied_map_of,
)
from .pickles import is_pickle, load_pickle
from .progress import Progress
from .tensors import map_tensors

__all__ = ["Source", "StateDict", "as_list", "merge", "open_source", "paths_of", "read_source", "read_sources"]

_PICKLE_INDEXES = (".bin.index.json", ".pt.index.json", ".pth.index.json")
_LAYERS = "_quantization_metadata"
_FOLDER_PICKLES = ("pytorch_model.bin.index.json", "pytorch_model.bin")


class StateDict(dict[str, Tensor]):
    """Weights by name. `report` says where they came from and how many bytes were copied."""

    report: dict[str, Any]
    metadata: dict[str, str]
    """What the files say besides."""

    def __init__(
        self, weights: Mapping[str, Tensor], report: dict[str, Any], metadata: Optional[dict[str, str]] = None
    ) -> None:
        super().__init__(weights)
        self.report = report
        self.metadata = metadata or {}

    def quantized(self) -> dict[str, QuantWeight]:
        """What of the weights is quantized, and how, by the weights' names. QuantizationError for what is not understood."""
        from ..quant_router import detect

        return detect(self, self.metadata)


@dataclass
class Source:
    """Weights and what came with them."""

    name: str
    """For errors: the path, or what it is."""
    sd: dict[str, Tensor]
    quantization_map: Optional[dict[str, Any]] = None
    tied_map: Optional[dict[str, list[str]]] = None
    notes: list[str] = field(default_factory=list)
    copied_bytes: int = 0
    """Bytes that were copied because they are not aligned in their file."""
    files: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    """What the files say besides, as texts."""
    packed: list[Any] = field(default_factory=list)
    """Quantized weights, once they were looked for."""
    foreign: dict[str, Any] = field(default_factory=dict)
    """Modules of an application's own formats."""
    unclear: bool = False
    """Whether something of it was not understood, which may not be wanted."""

    def report(self) -> dict[str, Any]:
        """What a user may want to know of how it was read."""
        return {"files": list(self.files), "notes": list(self.notes), "copied_bytes": self.copied_bytes}


def as_list(sources: Any) -> list[Any]:
    """One source or several, as a list. A tuple is one, weights with their maps, unless it is one of paths."""
    if sources is None:
        return []
    several = isinstance(sources, list) or (
        isinstance(sources, tuple) and all(isinstance(source, (str, os.PathLike)) for source in sources)
    )
    return list(sources) if several else [sources]


def paths_of(sources: Iterable[Any]) -> list[str]:
    """Those that are paths."""
    return [os.fspath(source) for source in sources if isinstance(source, (str, os.PathLike))]


def read_source(
    source: Any, progress: Any, wanted: Optional[Callable[[str], bool]] = None, allow_trailing: bool = False
) -> Source:
    """Reads a path, or takes a dictionary or a tuple of weights, quantization map and tied map.

    What of a file is not `wanted`, by its name, is left out and not read. Bytes behind the last tensor of a file are an error
    unless `allow_trailing`.
    """
    if isinstance(source, (str, os.PathLike)):
        return _read_path(os.fspath(source), progress, wanted or (lambda _: True), allow_trailing)
    parts = source if isinstance(source, tuple) else (source,)
    sd, quantization_map, tied_map = (*parts, None, None, None)[:3]
    if len(parts) > 3 or not isinstance(sd, Mapping) or not all(isinstance(value, Tensor) for value in sd.values()):
        raise WeightsError(
            f"weights come from a path, a dictionary of tensors, or a tuple (weights, quantization map, tied map), not "
            f"from a {type(source).__name__}"
        )
    odd = next((name for name in sd if not isinstance(name, str)), None)
    if odd is not None:
        raise WeightsError(f"the given weights name a tensor {odd!r}, which is no text")
    return Source("the given weights", dict(sd), quantization_map or None, tied_map or None)


def read_sources(
    sources: Iterable[Any],
    progress: Progress,
    wanted: Optional[Callable[[str], bool]] = None,
    allow_trailing: bool = False,
) -> list[Source]:
    """Reads several. A path that an earlier one stands for, as one shard does for all, is not read again."""
    found: list[Source] = []
    read: set[str] = set()
    for source in sources:
        if isinstance(source, (str, os.PathLike)) and "\0" in os.fsdecode(source):
            raise CheckpointError(f"{os.fsdecode(source)!r} is no path: it has a null byte")
        if isinstance(source, (str, os.PathLike)) and os.path.realpath(source) in read:
            continue
        found.append(read_source(source, progress, wanted, allow_trailing))
        if len(found[-1].files) > 1:
            read.update(map(os.path.realpath, found[-1].files))
    return found


def merge(sources: list[Source]) -> Source:
    """All of them as one model's weights."""
    if len(sources) == 1:
        return sources[0]
    merged = Source(", ".join(source.name for source in sources), {})
    owner: dict[str, str] = {}
    for source in sources:
        for name, tensor in source.sd.items():
            if name in owner:
                raise CheckpointError(f"{name} is in both {owner[name]} and {source.name}; give each weight once")
            owner[name] = source.name
            merged.sd[name] = tensor
        merged.quantization_map = _united(merged.quantization_map, source.quantization_map)
        merged.tied_map = _united(merged.tied_map, source.tied_map)
        merged.notes += source.notes
        merged.files += source.files
        merged.copied_bytes += source.copied_bytes
        merged.metadata = joined([merged.metadata, source.metadata])
        merged.packed += source.packed
        merged.foreign.update(source.foreign)
        merged.unclear |= source.unclear
    return merged


def joined(metadata: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The metadata of several files as one's. Descriptions of layers are put together."""
    result: dict[str, str] = {}
    for one in metadata:
        for key, value in one.items():
            if key == _LAYERS and key in result and result[key] != value:
                result[key] = _both(result[key], value)
            else:
                result[key] = value
    return result


def _both(first: str, second: str) -> str:
    """Two descriptions of layers as one; one that cannot be read as it is, so that whoever reads it says what is wrong."""
    one, two = _description(first), _description(second)
    if one is None or two is None:
        return first if one is None else second
    return json.dumps({**one, **two, "layers": {**(one.get("layers") or {}), **(two.get("layers") or {})}})


def _description(text: str) -> Optional[dict[str, Any]]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    right = isinstance(found, dict) and isinstance(found.get("layers") or {}, dict)
    return found if right else None


def _united(first: Optional[dict[str, Any]], second: Optional[dict[str, Any]]) -> Optional[dict[str, Any]]:
    return {**first, **second} if first and second else first or second


def open_source(path: str, allow_trailing: bool = False) -> Union[Checkpoint, list[str]]:
    """Opens a path: a checkpoint whose header is read, or the pickles that it stands for. `allow_trailing`: also where bytes
    follow the last tensor of a file."""
    path = _found(path)
    if os.path.isdir(path):
        try:
            inside = os.listdir(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        if not any(name.endswith((".safetensors", ".gguf", ".safetensors.index.json")) for name in inside):
            for name in _FOLDER_PICKLES:
                if os.path.isfile(os.path.join(path, name)):
                    return open_source(os.path.join(path, name))
    elif path.endswith(_PICKLE_INDEXES):
        return _indexed(path)
    elif not path.endswith(".json") and is_pickle(path):
        return [path]
    return Checkpoint.open([path], allow_trailing=allow_trailing)


def _read_path(path: str, progress: Progress, wanted: Callable[[str], bool], allow_trailing: bool) -> Source:
    reader = extension_of(path)
    if reader is not None:
        return _read_by(reader, path, wanted)
    opened = open_source(path, allow_trailing)
    describe_checkpoint(opened if isinstance(opened, list) else opened.files())
    if isinstance(opened, list):
        source = Source(path, {}, files=opened)
        for number, file in enumerate(opened):
            progress.poll(number / len(opened))
            for name, tensor in load_pickle(file, partial(_poll_part, progress, number, len(opened))).items():
                if name in source.sd:
                    raise CheckpointError(f"{name} is in more than one of the files of {path}, also in {file}")
                source.sd[name] = tensor
        source.quantization_map = sibling_map(path)
        return source
    entries = [entry for entry in opened.entries() if wanted(entry[0])]
    weights, packed, copied = map_tensors(opened, entries, progress.poll)
    quantization_map, tied_map = sibling_map(path), None
    broken: list[str] = []
    # Shards may have a map each.
    for metadata in opened.metadata():
        quantization_map = _united(quantization_map, quantization_map_of(metadata, path))
        wrong = broken_entries(metadata, path)
        broken += [what for what in wrong.values() if what not in broken]
        if "tied_weights_map" not in wrong:
            tied_map = _united(tied_map, tied_map_of(metadata, path))
    for name, kind in packed.items():
        quantization_map = quantization_map or {}
        quantization_map.setdefault(name.removesuffix(".weight"), {"weights": kind, "activations": "none"})
    for what in broken:
        warnings.warn(f"{what}; the weights are loaded without it", stacklevel=levels_outside())
    source = Source(path, weights, quantization_map, tied_map, [*opened.notes(), *broken], copied, opened.files())
    source.metadata = joined(opened.metadata())
    beside = quantization_config_beside(opened.files()[0]) if opened.files() else None
    if beside is not None:
        source.metadata.setdefault("quantization_config", beside)
    return source


def _read_by(reader: Any, path: str, wanted: Callable[[str], bool]) -> Source:
    """Reads a file by way of an application's handler."""
    name = name_of(reader)
    if callable(getattr(reader, "normalize", None)):
        path = os.fspath(call(name, reader.normalize, [path], {}))
    settings = {"writable_tensors": True, "verboseLevel": -1, "default_dtype": None, "pin_to_memory": False}
    given = call(name, reader.load_state_dict, [path], settings)
    source = read_source(given, None, None)
    source.name, source.files = path, [path]
    source.sd = {key: tensor for key, tensor in source.sd.items() if wanted(key)}
    if callable(getattr(reader, "get_file_metadata", None)):
        source.metadata = metadata_text(call(name, reader.get_file_metadata, [path], {}))
    return source


def _poll_part(progress: Progress, number: int, files: int, done: float) -> None:
    """Polls from within one of several files."""
    progress.poll((number + done) / files)


def _found(path: str) -> str:
    """The path, or the file that the model hub's local cache has for `owner/repository/file`."""
    try:
        os.stat(path)
        return path
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # of a folder that may not be entered, or a link to itself
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    parts = path.split("/")
    if len(parts) >= 3 and not os.path.isabs(path):
        try:
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache("/".join(parts[:2]), "/".join(parts[2:]))
        except (ImportError, ValueError):
            cached = None
        if isinstance(cached, str):
            return cached
    raise CheckpointError(f"{path or 'an empty path'} does not exist, here or in the local cache of the model hub")


def _indexed(path: str) -> list[str]:
    """The pickles that an index names, all of them checked to be there."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path} has no weight_map, which says what file holds which weight")
    folder = os.path.dirname(path)
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        if not name or name != os.path.basename(name) or name in (".", "..") or "\0" in name:
            raise CheckpointError(f"{path} names the file {name!r}, which leaves its folder")
    missing = [name for name in names if not os.path.isfile(os.path.join(folder, name))]
    if missing:
        raise CheckpointError(f"{path} names {len(missing)} files that are missing: {', '.join(missing[:8])}")
    return [os.path.join(folder, name) for name in names]
