"""Run PyTorch models larger than their VRAM budget at the speed of the link, with the same bits out.

    import weightstream

    with weightstream.attach(model, budget="8GiB"):
        with torch.inference_mode():
            output = model(inputs)

Importing this patches nothing, starts no thread and needs no GPU.
"""

from __future__ import annotations

from . import offload
from ._native import __version__
from .attach import attach
from .attachment import Attachment
from .devices import HostDevice
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
    QuantizationError,
    StateError,
    UnsafeCheckpointError,
    WeightsError,
    WeightstreamError,
)

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
    "QuantizationError",
    "StateError",
    "UnsafeCheckpointError",
    "WeightsError",
    "WeightstreamError",
    "__version__",
    "attach",
    "offload",
]
