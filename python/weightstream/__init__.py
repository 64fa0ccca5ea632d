"""Run PyTorch models larger than their VRAM budget at the speed of the link, with the same bits out.

    import weightstream

    with weightstream.attach(model, budget="8GiB"):
        with torch.inference_mode():
            output = model(inputs)

Importing this patches nothing, starts no thread and needs no GPU. What needs PyTorch is imported when it is first used, so that
`weightstream.startup` can measure that import too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._native import __version__
from .errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    DeviceError,
    ForwardError,
    InternalError,
    LoadingCancelled,
    ModelError,
    NotAvailableError,
    ProfileError,
    QuantizationError,
    StateError,
    TimingError,
    UnsafeCheckpointError,
    WeightsError,
    WeightstreamError,
)

if TYPE_CHECKING:
    from . import (
        allocator,
        cuda_graphs,
        expert_compute,
        experts,
        loaders,
        offload,
        quant,
        quant_router,
        runtime,
        startup,
    )
    from .attaching import attach
    from .attachment import Attachment
    from .devices import HostDevice
    from .offload.profiles import profile_type

__all__ = [
    "Attachment",
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "ForwardError",
    "HostDevice",
    "InternalError",
    "LoadingCancelled",
    "ModelError",
    "NotAvailableError",
    "ProfileError",
    "QuantizationError",
    "StateError",
    "TimingError",
    "UnsafeCheckpointError",
    "WeightsError",
    "WeightstreamError",
    "__version__",
    "allocator",
    "attach",
    "cuda_graphs",
    "dynamic_offload",
    "expert_compute",
    "experts",
    "loaders",
    "offload",
    "profile_type",
    "quant",
    "quant_router",
    "runtime",
    "startup",
]

_LATER = {
    "attach": "attaching",
    "Attachment": "attachment",
    "HostDevice": "devices",
    "profile_type": "offload.profiles",
}
"""Names, and the modules that they are imported from when they are first used."""


def __getattr__(name: str) -> Any:
    place = f"{__name__}.{name}"
    if name in _LATER:
        found = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    elif name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        try:
            found = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name != place:
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
