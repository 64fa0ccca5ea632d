"""A pipeline's components, each loaded by what loads its kind, in a phase of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Optional, Union

import torch
from torch import nn

from ..errors import ConfigError
from ..offload.metadata import read_json
from ..startup.phases import phase
from .common import Path, library_class
from .text_encoder import TextEncoderLoader
from .transformer import TransformerLoader, is_fsdp
from .vae import VAELoader

__all__ = ["PipelineComponentLoader"]


class PipelineComponentLoader:
    """Loads the components of a pipeline's folder, as diffusers saves it, without downloading anything.

    Each is recorded as `component.<name>`, with the phases of its loader inside: `VAELoader` for autoencoders,
    `TransformerLoader` for other models of diffusers, `TextEncoderLoader` for models of transformers. Tokenizers, schedulers
    and processors, and what `constructors` make, have only the phase of the component.
    """

    def __init__(
        self,
        path: Path,
        *,
        device: Union[str, torch.device] = "cpu",
        dtype: Optional[torch.dtype] = None,
        vae_dtype: Optional[torch.dtype] = torch.float32,
        fsdp: bool = False,
        compile: bool = False,
        pretrained_encoders: bool = False,
        encoder_budget: Union[int, str, None] = None,
        constructors: Mapping[str, Callable[[str], Any]] = {},
        allow_trailing: bool = False,
    ) -> None:
        """path: a folder with model_index.json. dtype: of transformers and encoders; None keeps the files'. fsdp, compile: of
        transformers. pretrained_encoders: let transformers load its own models. encoder_budget: stream encoders with so much
        memory for weights. constructors: by a component's name, what makes it from its folder. allow_trailing: as for `offload.load_sd`."""
        self.path = os.fspath(path)
        self.index: dict[str, Any] = dict(read_json(os.path.join(self.path, "model_index.json")))
        self.device = torch.device(device)
        self._constructors = dict(constructors)
        self._vae = VAELoader(self.device, vae_dtype, allow_trailing=allow_trailing)
        self._transformer = TransformerLoader(
            self.device, dtype, fsdp=fsdp, compile=compile, allow_trailing=allow_trailing
        )
        self._encoder = TextEncoderLoader(
            self.device,
            dtype,
            pretrained=pretrained_encoders,
            budget=encoder_budget,
            allow_trailing=allow_trailing,
        )

    @property
    def names(self) -> list[str]:
        """The components that the pipeline has."""
        return [
            name
            for name, entry in self.index.items()
            if isinstance(entry, list) and len(entry) == 2 and all(part is not None for part in entry)
        ]

    def load_module(self, name: str) -> Any:
        """One component, ready to use."""
        if name not in self.names:
            raise ConfigError(f"{self.path} has no component {name!r}; it has {', '.join(self.names)}")
        if name != os.path.basename(name) or name in (".", ".."):
            raise ConfigError(f"{self.path} names a component {name!r}, which leaves its folder")
        with phase(f"component.{name}"):
            return self._load(name, os.path.join(self.path, name))

    def load_modules(self, names: Optional[Iterable[str]] = None) -> dict[str, Any]:
        """Several components, or all of them, in the order of the index."""
        return {name: self.load_module(name) for name in (self.names if names is None else names)}

    def load_pipeline(self, **settings: Any) -> Any:
        """The pipeline of all its components. `settings` go to its class, beside what the index says of it."""
        name = self.index.get("_class_name")
        pipeline_class: Any = library_class("diffusers", name, os.path.join(self.path, "model_index.json"))
        given = {
            key: value
            for key, value in self.index.items()
            if not key.startswith("_") and not isinstance(value, (list, dict)) and value is not None
        }
        return pipeline_class(**self.load_modules(), **{**given, **settings})

    def settings(self, components: Mapping[str, Any]) -> dict[str, Any]:
        """What the loaded components are, asked of them and not of the arguments: for reports, and to be checked."""
        models = {name: model for name, model in components.items() if isinstance(model, nn.Module)}
        streams = {name: any("_weightstream" in m.__dict__ for m in model.modules()) for name, model in models.items()}
        moved = {
            name: any(p.device.type != self.device.type for p in model.parameters()) and not streams[name]
            for name, model in models.items()
        }
        return {
            "device": str(self.device),
            "fsdp": {name: is_fsdp(model) for name, model in models.items()},
            "cpu_offload": moved,
            "streamed": streams,
            "compiled": {name: any(_compiled(m) for m in model.modules()) for name, model in models.items()},
        }

    def _load(self, name: str, folder: str) -> Any:
        if name in self._constructors:
            return self._constructors[name](folder)
        library, class_name = self.index[name]
        component: Any = library_class(library, class_name, os.path.join(self.path, "model_index.json"))
        if not issubclass(component, nn.Module):
            return component.from_pretrained(folder, local_files_only=True)
        if library == "transformers":
            return self._encoder.load(folder)
        return self._vae.load(folder) if class_name.startswith("Autoencoder") else self._transformer.load(folder)


def _compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None
