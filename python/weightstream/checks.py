"""What attach refuses before it changes anything."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .errors import ModelError, StateError
from .guard import ManagedParameter
from .spans import inner_tensors, tensor_bytes

__all__ = ["MARK", "OFFLOAD_MARK", "check_model"]

MARK = "_weightstream"
"""The attribute that every module of an attached model carries: its Attachment."""
OFFLOAD_MARK = "_weightstream_dynamic_offload"
"""The attribute that a module carries which `enable_offload` was called on: what was applied."""

_OFFLOADING = ("offload", "layerwise_casting")
"""Parts of the names under which diffusers registers hooks that move or cast weights."""


def check_model(model: object, anywhere: bool = False) -> None:
    """Raises ModelError or StateError, naming what is wrong, for a model that cannot be attached. `anywhere` says that it need
    not be in CPU memory yet."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"attach takes a torch.nn.Module, not a {type(model).__name__}{_instead(model)}")
    for name, module in model.named_modules():
        where = name or type(model).__name__
        if MARK in module.__dict__:
            raise StateError(f"{where} is already attached; call detach() of its attachment first: model.{MARK}")
        applied = module.__dict__.get(OFFLOAD_MARK)
        if getattr(applied, "route", None) == "linear_convolution":
            raise StateError(f"{where} is on the convolution route; call remove_dynamic_offload on it first")
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(f"{where} is a ScriptModule, whose forward cannot be wrapped; attach the eager model")
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise ModelError(f"{where} is a {type(module).__name__}; attach its .module instead")
        _check_hooks(where, module)
        for kind in (module._parameters, module._buffers):
            for key, tensor in kind.items():
                if tensor is not None:
                    _check_tensor(f"{name}.{key}" if name else key, tensor, anywhere)


def _instead(pipeline: object) -> str:
    """Which parts of something that is not a module can be attached, largest first: those of diffusers' pipelines."""
    try:
        parts = getattr(pipeline, "components", None) or vars(pipeline)
        modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    except Exception:  # noqa: BLE001
        return ""  # whatever it is, it is refused
    if not modules:
        return ""
    names = sorted(modules, key=lambda name: tensor_bytes(modules[name]), reverse=True)
    return f"; attach its modules one by one: {', '.join(f'.{name}' for name in names)}"


def _check_hooks(where: str, module: nn.Module) -> None:
    """Refuses modules that somebody else moves or casts around their forward."""
    if getattr(module, "_hf_hook", None) is not None:
        kind = type(module._hf_hook).__name__
        raise ModelError(
            f"{where} has accelerate's {kind} hook; call accelerate.hooks.remove_hook_from_module(model, recurse=True)"
        )
    registry = getattr(module, "_diffusers_hook", None)
    for hook in getattr(registry, "hooks", {}):
        if any(part in hook for part in _OFFLOADING):
            raise ModelError(f"{where} has diffusers' {hook!r} hook, which moves or casts its weights; remove it first")


def _check_tensor(path: str, tensor: Tensor, anywhere: bool) -> None:
    """Refuses tensors that are not in host memory, or, with `anywhere`, nowhere."""
    # Before PyTorch 2.6 isinstance calls any wrapped parameter an instance of every parameter class.
    if issubclass(type(tensor), ManagedParameter):
        raise StateError(f"{path} belongs to a model that is attached; detach() it first")
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        return  # named by the ownership pass
    for inner, leaf in inner_tensors(tensor):
        name = ".".join((path, *inner))
        if leaf.is_meta:
            raise ModelError(f"{name} is on the meta device: load the model's weights before attaching")
        if leaf.device.type != "cpu" and not (anywhere and leaf.device.type == "cuda"):
            raise ModelError(f"{name} is on {leaf.device}; attach takes models in CPU memory: call model.cpu() first")
