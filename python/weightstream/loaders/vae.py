"""A VAE, in the two steps that can be had apart: building the module, and filling it from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from ..errors import WeightsError
from ..offload.loading import load_sd
from ..offload.renaming import preprocess
from ..startup.phases import phase
from .common import Path, config_of, construct, default_dtype, library_class, materialize

__all__ = ["VAELoader"]

Remap = Union[Callable[..., Any], Mapping[str, Optional[str]], None]


class VAELoader:
    """Loads a VAE of diffusers from its component's folder.

    Its phases are `vae.construct`, `vae.device_transfer`, `vae.checkpoint_read`, `vae.weight_assignment` and `vae.finalize`.
    They are steps of loading and not measurements of a disk or a link: a file is mapped when it is read, so that its pages
    come in when weights are assigned.
    """

    def __init__(
        self,
        device: Union[str, torch.device] = "cpu",
        dtype: Optional[torch.dtype] = torch.float32,
        *,
        allow_trailing: bool = False,
    ) -> None:
        """device: where it computes. dtype: of its parameters; None is PyTorch's default. allow_trailing: as for
        `offload.load_sd`."""
        self.device = torch.device(device)
        self.dtype = dtype
        self.allow_trailing = allow_trailing

    def load(self, path: Path) -> nn.Module:
        """The VAE in the folder, ready to use: `build_model`, then `load_weights`."""
        config = config_of(path)
        model_class = library_class("diffusers", config.get("_class_name"), str(path))
        with default_dtype(self.dtype):
            model = self.build_model(model_class, config)
        return self.load_weights(model, path)

    def build_model(self, model_class: type, config: Mapping[str, Any]) -> nn.Module:
        """The module on the device, its parameters without numbers yet.

        The caller chooses class and configuration; the type of parameters is PyTorch's default at the call.
        """
        with phase("vae.construct"):
            model = construct(model_class, dict(config), getattr(model_class, "__name__", "the VAE"))
        with phase("vae.device_transfer"):
            materialize(model, self.device)
        return model

    def load_weights(
        self,
        model: nn.Module,
        path: Path,
        *,
        strict: bool = True,
        remap: Remap = None,
        overlay: Optional[Callable[[nn.Module], Any]] = None,
        memory_format: Optional[torch.memory_format] = None,
    ) -> nn.Module:
        """Copies the weights of a file or folder into the model, whose tensors stay the same objects.

        strict: weights that the model does not use are an error. Missing ones always are: they would be any numbers.
        remap: rules or a function for names, as `preprocess_sd` of `offload.load_model_data`.
        overlay: changes the model after its weights are there. memory_format: what its tensors get in the end.
        """
        with phase("vae.checkpoint_read") as reading:
            weights: dict[str, Tensor] = dict(load_sd(path, allow_trailing=self.allow_trailing)[0])
            reading.count("tensors", len(weights))
        with phase("vae.weight_assignment"):
            weights = dict(preprocess(remap, weights, None, None)[0])
            _assign(model, weights, str(path), strict)
        with phase("vae.finalize"):
            if overlay is not None:
                overlay(model)
            if memory_format is not None:
                model.to(memory_format=memory_format)
            model.eval()
        return model


def _assign(model: nn.Module, weights: dict[str, Tensor], where: str, strict: bool) -> None:
    """Copies; WeightsError, before anything is copied, for names and shapes that do not fit."""
    wanted = model.state_dict()
    missing = sorted(set(wanted).difference(weights))
    unused = sorted(set(weights).difference(wanted)) if strict else []
    shapes = [name for name in wanted if name in weights and weights[name].shape != wanted[name].shape]
    for names, what in [
        (missing, "lacks"),
        (unused, "has, and the model does not use,"),
        (shapes, "has in other shapes"),
    ]:
        if names:
            listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            raise WeightsError(f"{where} {what} {len(names)} weights of {type(model).__name__}: {listed}")
    model.load_state_dict({name: weights[name] for name in wanted}, strict=True)
