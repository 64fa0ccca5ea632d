"""Run PyTorch models larger than their VRAM budget at the speed of the link, with the same bits out.

    import weightstream

    with weightstream.attach(model, budget="8GiB"):
        with torch.inference_mode():
            output = model(inputs)

Importing this patches nothing, starts no thread and needs no GPU.
"""

from __future__ import annotations

from ._native import __version__
from .attach import attach
from .attachment import Attachment
from .devices import HostDevice
from .errors import (
    BudgetError,
    DeviceError,
    ForwardError,
    InternalError,
    ModelError,
    StateError,
    WeightstreamError,
)

__all__ = [
    "Attachment",
    "BudgetError",
    "DeviceError",
    "ForwardError",
    "HostDevice",
    "InternalError",
    "ModelError",
    "StateError",
    "WeightstreamError",
    "__version__",
    "attach",
]
