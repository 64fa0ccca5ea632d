"""Chooses the device that a model's weights stream to: a CUDA device, or the emulator in host memory."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from functools import cache, partial
from typing import Callable, Union

import torch

from . import _native
from .errors import BudgetError, DeviceError

__all__ = ["DeviceArgument", "HostDevice", "Target", "open_target"]

_ORDERS = ("eager", "lazy", "random")


@dataclass(frozen=True)
class HostDevice:
    """An emulated device: memory of this process that streams, waits and runs out of room as a GPU's would.

    For machines without a GPU and for tests. The model computes on the CPU.
    """

    bytes: Union[int, str, None] = None
    """Its memory, such as ``"64MiB"``; half of the machine's RAM if not given. Taken only as it is written."""
    granularity: int = 64 << 10
    """The smallest piece its memory comes in, a power of two. GPUs have 2 MiB; small models need less."""
    bandwidth: Union[int, None] = None
    """Bytes a second that copies take at most; not limited if not given."""
    order: str = "eager"
    """When its copies run: "eager", "lazy" (not before somebody waits) or "random"."""
    seed: int = 0
    """Seeds the random order."""
    poison: bool = False
    """Whether streamed memory is overwritten with 0xFF after its last use, so that a missing wait shows as NaN."""

    def __post_init__(self) -> None:
        """Raises DeviceError for what no device could be."""
        self._open()

    def _open(self) -> _native.Device:
        if self.order not in _ORDERS:
            raise DeviceError(f"the copy order {self.order!r} is none of {', '.join(_ORDERS)}")
        try:
            size = _half_of_ram() if self.bytes is None else _native.parse_bytes(self.bytes)
        except (BudgetError, OverflowError) as error:
            raise DeviceError(
                f"a host device of the size bytes={self.bytes!r} cannot be made: give a number of bytes above 0, or a text "
                f'such as "64MiB" or "2GB"'
            ) from error
        try:
            return _native.Device.host(size, self.granularity, self.bandwidth, self.order, self.seed)
        except (TypeError, OverflowError) as error:
            raise DeviceError(f"{self} cannot be a device: {error}") from None


DeviceArgument = Union[str, torch.device, HostDevice]
"""``"auto"``, ``"cuda"``, ``"cuda:1"``, ``"host"`` or a `HostDevice`."""


@dataclass(frozen=True)
class Target:
    """The device that was chosen."""

    native: _native.Device
    """Its driver."""
    device: torch.device
    """Where its tensors are for PyTorch: the emulator's are CPU tensors."""
    reason: str
    """Why this one."""
    poison: bool = False
    """Whether streamed memory is overwritten after its last use."""

    @property
    def emulated(self) -> bool:
        """Whether it is the emulator."""
        return self.device.type == "cpu"

    def stream_getter(self) -> Callable[[], int]:
        """A cheap function that gives the raw pointer of the calling thread's current stream on this device."""
        if self.emulated:
            return int
        index = self.device.index
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        if raw is not None:
            return partial(raw, index)
        return lambda: torch.cuda.current_stream(index).cuda_stream

    def synchronize(self) -> None:
        """Waits until all work on the device has run, on whichever stream a thread submitted it."""
        if not self.emulated:
            torch.cuda.synchronize(self.device)


def open_target(device: DeviceArgument) -> Target:
    """Opens what `device` names, or raises `DeviceError` that says why it cannot be used."""
    if isinstance(device, HostDevice):
        return Target(device._open(), torch.device("cpu"), "asked for the host device", device.poison)
    name = str(device) if isinstance(device, (str, torch.device)) else None
    if name == "auto":
        return _automatic()
    if name == "host":
        return open_target(HostDevice())
    if name is not None and name.split(":")[0] == "cuda":
        return _cuda(name, f"asked for {name}")
    raise DeviceError(f'{device!r} is no device for weights; give "auto", "cuda", "cuda:1", "host" or a HostDevice')


def _automatic() -> Target:
    """CUDA if torch sees a GPU and the driver can stream, else the emulator, with the reason."""
    if not torch.cuda.is_available():
        reason = "PyTorch sees no CUDA device"
    else:
        try:
            return _cuda("cuda", "PyTorch sees a CUDA device and its driver can stream")
        except DeviceError as error:
            reason = str(error)
    _warn_of_fallback(reason)
    return Target(HostDevice()._open(), torch.device("cpu"), f"the host device, since {reason}")


@cache
def _warn_of_fallback(reason: str) -> None:
    """Says once what is easily missed: the model runs, but on the CPU."""
    warnings.warn(
        f"{reason}: weights stream to an emulated device in host memory, and the model computes on the CPU. "
        f'device="host" asks for that without this warning',
        RuntimeWarning,
        stacklevel=6,
    )


def _cuda(name: str, reason: str) -> Target:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"{name!r} is no CUDA device: {str(error).splitlines()[0]}") from None
    if not torch.cuda.is_available():
        # The driver's own word is more use than PyTorch's "no", which may only mean a build without CUDA.
        _native.Device.cuda(device.index or 0)
        raise DeviceError(f"{name}: this PyTorch ({torch.__version__}) cannot use CUDA; install a build that can")
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise DeviceError(f"there is no device {name}; PyTorch sees {count}")
    return Target(_native.Device.cuda(index), torch.device("cuda", index), reason)


def _half_of_ram() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
