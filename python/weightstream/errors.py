"""The exceptions of weightstream: one class for each kind of refusal, all under `WeightstreamError`.

Every one of them means that nothing was changed: a refused attach leaves the model as it was, a refused call leaves
the engine ready for the next one. The native module raises these classes too; it looks them up here by name.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "ForwardError",
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
]


class WeightstreamError(Exception):
    """The base of every error that weightstream raises on purpose."""


class BudgetError(WeightstreamError):
    """The budget cannot be read, or no plan fits in it.

    When the budget is too small, the text names the smallest one that works and the largest unit.
    """


class ModelError(WeightstreamError):
    """The model cannot be managed: the text names the module or tensor and what to change about it."""


class DeviceError(WeightstreamError):
    """There is no such device, it cannot do what streaming needs, or its driver refused a call."""


class StateError(WeightstreamError):
    """The call does not fit the state of the model or the engine.

    Attaching twice, moving or copying an attached model, entering it from a second thread, from a forked child or
    while a stream is being captured, using a detached attachment, a managed tensor that was replaced.
    """


class ForwardError(WeightstreamError):
    """What the model does in its forward cannot be streamed rightly.

    An input or output that requires grad, or a write to a managed parameter.
    """


class CheckpointError(WeightstreamError):
    """A file cannot be read or written as a checkpoint: the text names the file, the tensor and the numbers."""


class UnsafeCheckpointError(CheckpointError):
    """A pickle wants more than tensors: it would run code of whoever wrote it."""


class WeightsError(WeightstreamError):
    """The weights do not fit the model, or rules for renaming and splitting do not fit the weights."""


class ConfigError(WeightstreamError):
    """A model's configuration is missing or cannot be read, or names no class that can be built."""


class NotAvailableError(WeightstreamError):
    """What was asked for is not offered yet; the text says what is instead."""


class QuantizationError(WeightstreamError):
    """A quantized weight that is not understood or cannot be computed with; the text names the layer.

    Packed bytes never reach a layer of floats instead.
    """


class ProfileError(WeightstreamError):
    """A workload's profile cannot be kept: its name, an entry or the folder's lock is refused. The file is as it was."""


class LoadingCancelled(WeightstreamError):
    """Loading was stopped by `LoadingCallback.abort_requested`. Nothing was changed, and nothing is kept."""


class TimingError(WeightstreamError):
    """Startup timings: a file that is no report or cannot be written, a phase misused, or a synchronization callback that failed."""


class InternalError(WeightstreamError):
    """A broken promise inside weightstream. Please report it with its text."""
