"""What the convolution route refuses at set-up, before any tensor is moved."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..checks import MARK
from ..errors import DeviceError, StateError
from ..spans import is_wrapper
from .config import DynamicOffloadConfig
from .routes import has_sdnq_layers

__all__ = ["CONVOLUTIONS", "preflight"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""The layers that the route is about, and what is derived from them."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def preflight(module: nn.Module, config: DynamicOffloadConfig, device: torch.device) -> None:
    """ValueError that names what is wrong."""
    _check_configuration(config)
    for name, part in module.named_modules():
        if MARK in part.__dict__:
            raise StateError(
                f"{name or type(module).__name__} is attached; detach() it before offloading its convolutions"
            )
    if isinstance(module, CONVOLUTIONS):
        raise ValueError(f"the module itself is a {type(module).__name__}; offload the module that holds it")
    if has_sdnq_layers(module):
        raise ValueError("the module has layers quantized by SDNQ, which the convolution route does not take")
    names: dict[int, str] = {}
    for name, part in module.named_modules():
        if isinstance(part, CONVOLUTIONS):
            names[id(part)] = name
            _check_layer(name, part)
    _check_ownership(module)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}; the convolution route takes modules in CPU memory")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError(f"{device}: PyTorch sees no CUDA device")
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            raise ValueError(f"PyTorch's CUDA allocator is {backend!r}; the convolution route needs the native one")


def _check_configuration(config: DynamicOffloadConfig) -> None:
    if config.auto_budget_policy != "off":
        raise ValueError(f"auto_budget_policy is {config.auto_budget_policy!r}; the convolution route needs 'off'")
    if config.resident_module_budget_gb != 0:
        raise ValueError(
            f"resident_module_budget_gb is {config.resident_module_budget_gb}; the convolution route needs 0"
        )
    if config.always_resident_modules_pattern:
        raise ValueError("always_resident_modules_pattern is set; the convolution route keeps no layer resident")
    if config.build_profile:
        raise ValueError("build_profile measures residents, and the convolution route has none")


def _check_layer(name: str, layer: nn.Module) -> None:
    where = f"the convolution {name!r}"
    if layer.training:
        raise ValueError(f"{where} is in training mode; call eval() first")
    if layer._modules:
        raise ValueError(f"{where} has modules inside it ({', '.join(layer._modules)}), such as parametrizations")
    if layer._buffers:
        raise ValueError(f"{where} has buffers ({', '.join(layer._buffers)})")
    if layer._forward_hooks or layer._forward_pre_hooks:
        raise ValueError(f"{where} has forward hooks")
    for attribute in ("_diffusers_hook", "_hf_hook"):
        if getattr(layer, attribute, None) is not None:
            raise ValueError(f"{where} has {attribute}: another library acts around its calls")
    for key, parameter in layer._parameters.items():
        if parameter is not None:
            _check_parameter(f"{name}.{key}", parameter)


def _check_parameter(name: str, parameter: Tensor) -> None:
    if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
        raise ValueError(f"{name} is a {type(parameter).__name__}, not a plain nn.Parameter")
    if parameter.device.type != "cpu":
        raise ValueError(f"{name} is on {parameter.device}; the convolution route takes weights in CPU memory")
    if parameter.layout is not torch.strided:
        raise ValueError(f"{name} has the layout {parameter.layout}")
    if parameter.dtype not in _DTYPES:
        raise ValueError(f"{name} is {parameter.dtype}; the convolution route takes floating point weights")
    if not _dense(parameter):
        raise ValueError(
            f"{name} is neither contiguous nor channels_last (strides {parameter.stride()}); call contiguous() on it first"
        )


def _dense(tensor: Tensor) -> bool:
    """Whether a copy keeps its strides: contiguous, or channels_last."""
    if tensor.is_contiguous():
        return True
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)


def _check_ownership(module: nn.Module) -> None:
    """Refuses a convolution's parameter that another place has too, as the same object or as the same storage."""
    own: dict[int, str] = {}
    storages: dict[int, str] = {}
    convolutions = {id(part) for part in module.modules() if isinstance(part, CONVOLUTIONS)}
    owners: list[tuple[str, Tensor, bool]] = []
    for name, part in module.named_modules():
        for key, parameter in [*part._parameters.items(), *part._buffers.items()]:
            if parameter is not None:
                owners.append((f"{name}.{key}" if name else key, parameter, id(part) in convolutions))
    for name, parameter, _ in owners:
        if is_wrapper(parameter):
            raise ValueError(f"{name} is a {type(parameter).__name__}, which the convolution route does not take")
    for name, parameter, convolution in sorted(owners, key=lambda owner: not owner[2]):
        storage = parameter.untyped_storage().data_ptr() if parameter.layout is torch.strided else 0
        if id(parameter) in own:
            raise ValueError(f"{name} is the same parameter as {own[id(parameter)]}")
        if storage and storage in storages:
            raise ValueError(f"{name} shares its storage with {storages[storage]}")
        # Tensors of other layers may share among themselves.
        if convolution:
            own[id(parameter)] = name
            storages[storage] = name
