"""Where a model's configuration comes from: the file's metadata, else the paths that were given, else config.json beside.

The order: the metadata of the files, `forcedConfigPath`, `defaultConfigPath`, and `config.json` next to the last file. An entry in the
metadata that cannot be read counts only where neither path is given; it is an error then.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Optional, Union

from ..errors import ConfigError, CheckpointError
from ..quant_router.calling import call
from ..quant_router.registry import extension_of, metadata_text, name_of
from .gguf_config import gguf_config
from .metadata import config_of, read_json
from .sources import joined, open_source

__all__ = ["find_config"]


def find_config(
    paths: list[str],
    forced: Union[str, os.PathLike[str], Mapping[str, Any], None],
    default: Union[str, os.PathLike[str], Mapping[str, Any], None],
    allow_trailing: bool = False,
) -> tuple[dict[str, Any], str]:
    """The configuration for a model in these files, and where it was found. ConfigError if nowhere."""
    written: list[tuple[Any, str]] = []
    broken: Optional[CheckpointError] = None
    for path in paths:
        reader = extension_of(path)
        if reader is not None:
            found = _of_reader(reader, path)
            if found:
                return found, f"the metadata of {path}"
            continue
        opened = open_source(path, allow_trailing)
        for metadata in [] if isinstance(opened, list) else opened.metadata():
            try:
                config = config_of(metadata, path)
            except CheckpointError as error:
                broken = broken or error
                continue
            if config:
                return config, f"the metadata of {path}"
        if not isinstance(opened, list):
            written += [(opened, path)]
    for given in (forced, default):
        if given is not None:
            return _given(given)
    if broken is not None:
        # The one beside may be another model's: who wants it names it.
        raise ConfigError(
            f"{broken}; give the right configuration as forcedConfigPath, or write the file anew"
        ) from None
    beside = _beside(paths[-1]) if paths else None
    if beside is not None:
        return _read(beside), beside
    for opened, path in written:
        shapes = {name: list(shape) for name, _, shape, *_ in opened.entries()}
        config = gguf_config(joined(opened.metadata()), shapes, path)
        if config is not None:
            return config, f"the metadata of {path}"
    raise ConfigError(
        f"no configuration for {', '.join(paths) or 'the given weights'}: it is not in the metadata, there is no config.json "
        f"beside, and neither forcedConfigPath nor defaultConfigPath was given"
    )


def _of_reader(reader: Any, path: str) -> Optional[dict[str, Any]]:
    """The configuration that an application's handler of files gives."""
    if not callable(getattr(reader, "get_file_metadata", None)):
        return None
    metadata = call(name_of(reader), reader.get_file_metadata, [path], {}) or {}
    config = metadata.get("config")
    return dict(config) if isinstance(config, Mapping) else config_of(metadata_text(metadata), path)


def _given(given: Union[str, os.PathLike[str], Mapping[str, Any]]) -> tuple[dict[str, Any], str]:
    if isinstance(given, Mapping):
        return dict(given), "the given configuration"
    path = os.fspath(given)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    return _read(path), path


def _beside(path: str) -> Optional[str]:
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    beside = os.path.join(folder, "config.json")
    return beside if os.path.isfile(beside) else None


def _read(path: str) -> dict[str, Any]:
    try:
        return read_json(path)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
