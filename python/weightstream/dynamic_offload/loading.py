"""Loading a model and offloading it in one call."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any, Union

from ..offload.redirect import redirect_safetensors
from .config import DynamicOffloadConfig, checked
from .enabling import enable_offload
from .results import DynamicOffloadLoadResult
from .routes import DYNAMIC

__all__ = ["from_pretrained_with_dynamic_offload"]


def from_pretrained_with_dynamic_offload(
    pretrained_model_name_or_path: Union[str, os.PathLike],
    *,
    model_loader: Any | None = None,
    dynamic_offload_config: DynamicOffloadConfig | None = None,
    apply_dynamic: bool = False,
    profile_name: str | None = None,
    build_profile: bool | None = None,
    **from_pretrained_kwargs: Any,
) -> DynamicOffloadLoadResult:
    """Loads a model by its class's `from_pretrained` and, with `apply_dynamic`, puts it on the dynamic route.

    `model_loader` is a class of transformers or diffusers, diffusers' AutoModel if not given; further arguments are its own.
    With `load_safetensors_backend="mmap"` safetensors files are opened by `offload.redirect_safetensors`: weights show the file's
    pages, and are page-locked there.

    Profile options belong to the call that offloads: they are refused where this one does not.
    """
    config = DynamicOffloadConfig() if dynamic_offload_config is None else dynamic_offload_config
    if not apply_dynamic and (profile_name is not None or build_profile is not None):
        raise ValueError(
            "profile_name and build_profile belong to the enable_offload call that follows apply_dynamic=False"
        )
    named: dict[str, Any] = {} if profile_name is None else {"profile_name": profile_name}
    if build_profile is not None:
        named["build_profile"] = build_profile
    if apply_dynamic:
        mode = config.execution_mode if config.execution_mode != "plan" else "linear_runtime"
        config = checked(config, execution_mode=mode, **named)
    if model_loader is None:
        from diffusers import AutoModel as model_loader
    with redirect_safetensors() if config.load_safetensors_backend == "mmap" else nullcontext():
        module = model_loader.from_pretrained(pretrained_model_name_or_path, **from_pretrained_kwargs)
    if not apply_dynamic:
        return DynamicOffloadLoadResult(module)
    result = enable_offload(module, config=config, route=DYNAMIC, use_environment=False)
    return DynamicOffloadLoadResult(module, result.hook, False, result._profile, result)
