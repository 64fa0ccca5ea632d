"""What an attached model does when it is moved, copied, loaded into or saved: one behaviour each.

| call                                            | an attached model |
|-------------------------------------------------|-------------------|
| `state_dict()`                                  | CPU tensors: the host's bytes of parameters, copies of buffers |
| `to()`, `cuda()`, `half()`, `share_memory()`, … | `StateError` |
| `load_state_dict()`                             | `StateError` |
| diffusers' `load_lora_weights()`, transformers' `load_adapter()` | `StateError` |
| `copy.deepcopy()`, `pickle`, `torch.save`       | `StateError` |
| `nn.DataParallel` replicas                      | `StateError` |

The tensors of `state_dict()` are the bytes that are streamed, not copies of them: read them, do not write them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn

from .binding import Binding
from .errors import StateError
from .guard import ManagedParameter
from .overrides import Overrides

__all__ = ["refuse_changes"]

_REFUSED = {
    "_apply": "moved, cast or shared (to, cuda, cpu, half, share_memory)",
    "_load_from_state_dict": "loaded into (load_state_dict)",
    "__deepcopy__": "deep-copied",
    "__reduce_ex__": "pickled or saved whole; save its state_dict()",
    "_replicate_for_data_parallel": "replicated (nn.DataParallel)",
}


_LOADERS = ("load_lora_adapter", "load_adapter")
"""What diffusers' pipelines and transformers load adapters with."""


def refuse_changes(model: nn.Module, binding: Binding, overrides: Overrides, strangers: Collection[int] = ()) -> None:
    """Puts the behaviours above on every module of `model`, but those whose ids are `strangers`, which have them already."""
    for name, module in model.named_modules():
        if id(module) in strangers:
            continue
        where = name or type(model).__name__
        for method, what in _REFUSED.items():
            overrides.set(module, method, _refusal(where, what))
        overrides.set(module, "_save_to_state_dict", _saver(module, module._save_to_state_dict, binding))
    for method in _LOADERS:
        if callable(getattr(type(model), method, None)):
            overrides.set(model, method, _no_loader(type(model).__name__, method))


def _no_loader(name: str, method: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise StateError(
            f"{name} is attached, and {method} would put layers into it whose weights nobody places: load LoRAs with "
            f"weightstream.offload.load_loras_into_model(model, path), which needs no detach()"
        )

    return refuse


def _refusal(where: str, what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise StateError(f"{where} is attached and cannot be {what}; detach() it first")

    return refuse


def _saver(module: nn.Module, save: Callable[..., None], binding: Binding) -> Callable[..., None]:
    # nn.Module's own way only detaches each tensor, which for an absent one would copy it, to be replaced below.
    detaches_only = type(module)._save_to_state_dict is nn.Module._save_to_state_dict

    def save_host_bytes(destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        save(destination, prefix, keep_vars or detaches_only)
        if keep_vars:
            return
        if binding.holds:
            for name, value in destination.items():
                host = binding.host_of_held(value) if name.startswith(prefix) and isinstance(value, Tensor) else None
                if host is not None:
                    destination[name] = host.detach()
        for entries in (module._parameters, module._buffers):
            for name, tensor in entries.items():
                if isinstance(tensor, Tensor) and isinstance(destination.get(prefix + name), Tensor):
                    host = binding.host_value(tensor)
                    if host is None and issubclass(type(tensor), ManagedParameter):
                        host = tensor._weightstream.host  # a weight of this module's that lies in another model, too
                    if host is None and tensor.device.type != "cpu":
                        host = tensor.to("cpu")  # a buffer that stays on the device beside the model's pages
                    if host is not None:
                        destination[prefix + name] = host.detach()

    return save_host_bytes
