"""A text or image encoder of transformers: step by step, or as its library does it."""

from __future__ import annotations

import os
from typing import Any, Optional, Union

import torch
from torch import nn

from ..offload.loading import load_model_data
from ..startup.phases import phase
from .common import Path, config_of, construct, default_dtype, library_class

__all__ = ["TextEncoderLoader"]


class TextEncoderLoader:
    """Loads an encoder of transformers from its component's folder.

    Its phases are `text_encoder.construct`, `text_encoder.hydrate`, `text_encoder.device_transfer` and
    `text_encoder.offload_setup`, or the one phase `text_encoder.pretrained` where `from_pretrained` does all of it. Image
    encoders have the same: the component that they lie in says which it is.
    """

    def __init__(
        self,
        device: Union[str, torch.device] = "cpu",
        dtype: Optional[torch.dtype] = None,
        *,
        pretrained: bool = False,
        budget: Union[int, str, None] = None,
        allow_trailing: bool = False,
    ) -> None:
        """device: where it computes. dtype: of its parameters; None keeps the file's. pretrained: let transformers load it.
        budget: stream it with at most this much memory for weights (`weightstream.attach`), instead of moving all of it. allow_trailing:
        as for `offload.load_sd`; transformers has no such thing."""
        self.device = torch.device(device)
        self.dtype = dtype
        self.pretrained = pretrained
        self.budget = budget
        self.allow_trailing = allow_trailing

    def load(self, path: Path) -> nn.Module:
        """The encoder in the folder, ready to use."""
        config = config_of(path)
        names = config.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        model_class: Any = library_class("transformers", name, str(path))
        if self.pretrained:
            with phase("text_encoder.pretrained"):
                model = model_class.from_pretrained(os.fspath(path), dtype=self.dtype or "auto", local_files_only=True)
                return self._ready(model if self.budget is not None else model.to(self.device))
        with phase("text_encoder.construct"), default_dtype(self.dtype):
            model = construct(model_class, config, str(path))
        with phase("text_encoder.hydrate"):
            load_model_data(model, os.fspath(path), default_dtype=self.dtype, allow_trailing=self.allow_trailing)
        with phase("text_encoder.device_transfer"):
            if self.budget is None:
                model.to(self.device)
        with phase("text_encoder.offload_setup"):
            return self._ready(model)

    def _ready(self, model: nn.Module) -> nn.Module:
        model.requires_grad_(False).eval()
        if self.budget is not None:
            from ..attaching import attach

            attach(model, device="host" if self.device.type == "cpu" else str(self.device), budget=self.budget)
        return model
