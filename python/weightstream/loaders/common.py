"""What the loaders share: configurations, classes, and giving parameters memory on a device."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional, Union

import torch
from torch import nn

from ..errors import ConfigError
from ..offload.building import build
from ..offload.metadata import read_json

__all__ = ["Path", "config_of", "construct", "default_dtype", "library_class", "materialize", "no_poll"]

Path = Union[str, "os.PathLike[str]"]

_LIBRARIES = ("diffusers", "transformers")


def no_poll() -> None:
    """Nobody watches."""


def config_of(path: Path) -> dict[str, Any]:
    """The configuration of a component's folder."""
    return dict(read_json(os.path.join(os.fspath(path), "config.json")))


def library_class(library: Any, name: Any, where: str) -> type:
    """A class of diffusers or transformers. Only of these two: the names are text of strangers."""
    if library not in _LIBRARIES or not isinstance(name, str) or name.startswith("_"):
        raise ConfigError(
            f"{where} asks for {name!r} of {library!r}; only classes of {' and '.join(_LIBRARIES)} are loaded"
        )
    try:
        found = getattr(importlib.import_module(library), name, None)
    except ImportError as error:
        raise ConfigError(f"{where} asks for {name} of {library}, which cannot be imported: {error}") from error
    if not isinstance(found, type):
        raise ConfigError(f"{where} asks for {name}, and {library} has no such class")
    return found


@contextmanager
def default_dtype(dtype: Optional[torch.dtype]) -> Iterator[None]:
    """Modules that are made in this block have floating-point parameters of this type; None changes nothing."""
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def construct(model_class: type, config: dict[str, Any], where: str) -> nn.Module:
    """The module of a configuration, its parameters on the meta device: no time goes into numbers that are replaced."""
    return build(config, where, model_class, {}, no_poll)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Gives meta parameters memory on the device, without numbers, and moves everything else there. Ties stay."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                data = (
                    torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.detach().to(device)
                )
                # The old one is kept: its id must not be another's meanwhile.
                made[id(parameter)] = (parameter, nn.Parameter(data, requires_grad=parameter.requires_grad))
            module._parameters[name] = made[id(parameter)][1]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
