"""Builds a model from its configuration with no data: parameters on the meta device, buffers real.

Buffers stay real because those that no checkpoint holds, such as rotary frequencies, are computed while building.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Optional

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..errors import ConfigError, WeightstreamError

__all__ = ["build", "empty_weights"]

_RENAMED = {"T5WithLMHeadModel": "T5EncoderModel"}
"""Names of old configurations and the class that is meant: of T5 the encoder is what image and video models use."""


@contextmanager
def empty_weights(poll: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Modules built in this block, by this thread, have their parameters on the meta device.

    By PyTorch's own hook for registrations: nothing is replaced, and other threads build as ever.
    """
    thread = get_ident()

    def empty(_: nn.Module, __: str, parameter: Optional[nn.Parameter]) -> Optional[nn.Parameter]:
        if parameter is None or get_ident() != thread or parameter.is_meta:
            return None
        poll()
        made = type(parameter)(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        return made

    handle = register_module_parameter_registration_hook(empty)
    try:
        yield
    finally:
        handle.remove()


def build(
    config: Mapping[str, Any], where: str, model_class: Any, config_kwargs: Mapping[str, Any], poll: Callable[[], None]
) -> nn.Module:
    """The model that a configuration describes, in eval mode, without gradients and without data.

    With `architectures` it is a class of transformers, with `_class_name` one of diffusers; `model_class` counts before
    both. ConfigError if there is no such class, or it cannot be built from this configuration.
    """
    config = {**config, **config_kwargs}
    chosen = model_class or _class_of(config, where)
    try:
        # The buffers are in CPU memory whatever the default device is.
        with torch.device("cpu"), empty_weights(poll):
            model = _construct(chosen, config)
    except WeightstreamError:
        raise
    except Exception as error:
        name = getattr(chosen, "__name__", chosen)
        raise ConfigError(f"{name} cannot be built from {where}: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{where}: {getattr(chosen, '__name__', chosen)} makes a {type(model).__name__}, not a module"
        )
    model.eval().requires_grad_(False)
    model._config = config
    return model


def _construct(chosen: Any, config: dict[str, Any]) -> Any:
    """Builds a class the way it wants its configuration."""
    config_class = getattr(chosen, "config_class", None)
    if config_class is not None and hasattr(config_class, "from_dict"):
        return chosen(config_class.from_dict(config))
    if hasattr(chosen, "from_config"):
        return chosen.from_config(config)
    return chosen(**{name: value for name, value in config.items() if not name.startswith("_")})


def _class_of(config: Mapping[str, Any], where: str) -> type:
    """The class that a configuration names. Only models of the two libraries: it is text of strangers."""
    architectures = config.get("architectures")
    if isinstance(architectures, (list, tuple)) and architectures:
        return _library_class("transformers", "PreTrainedModel", str(architectures[0]), where)
    if isinstance(config.get("_class_name"), str):
        return _library_class("diffusers", "ModelMixin", config["_class_name"], where)
    raise ConfigError(
        f"{where} names no class, neither with architectures (transformers) nor with _class_name (diffusers); give modelClass"
    )


def _library_class(library: str, base: str, name: str, where: str) -> type:
    try:
        module = importlib.import_module(library)
        name = _RENAMED.get(name, name)
        found = getattr(module, name, None)
        fits = isinstance(found, type) and issubclass(found, getattr(module, base))
    except ImportError as error:
        raise ConfigError(f"{where} asks for {name} of {library}, which cannot be imported: {error}") from error
    if not fits:
        raise ConfigError(
            f"{where} asks for {name}, and {library} {module.__version__} has no such model; give modelClass"
        )
    return found
