"""Where a model's configuration comes from: the file's metadata, else the paths that were given, else config.json beside.

The order: the metadata of the files, `forcedConfigPath`, `defaultConfigPath`, and `config.json` next to the last file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Optional, Union

from ..errors import ConfigError, CheckpointError
from .metadata import config_of, read_json
from .sources import open_source

__all__ = ["find_config"]


def find_config(
    paths: list[str],
    forced: Union[str, os.PathLike[str], Mapping[str, Any], None],
    default: Union[str, os.PathLike[str], Mapping[str, Any], None],
) -> tuple[dict[str, Any], str]:
    """The configuration for a model in these files, and where it was found. ConfigError if nowhere."""
    for path in paths:
        opened = open_source(path)
        for metadata in [] if isinstance(opened, list) else opened.metadata():
            config = config_of(metadata, path)
            if config:
                return config, f"the metadata of {path}"
    for given in (forced, default):
        if given is not None:
            return _given(given)
    beside = _beside(paths[-1]) if paths else None
    if beside is not None:
        return _read(beside), beside
    raise ConfigError(
        f"no configuration for {', '.join(paths) or 'the given weights'}: it is not in the metadata, there is no config.json "
        f"beside, and neither forcedConfigPath nor defaultConfigPath was given"
    )


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
