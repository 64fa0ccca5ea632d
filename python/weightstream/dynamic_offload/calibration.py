"""Measures the most memory that is in use on a device while a region runs.

What is measured is the most that was in use on the device between the two ends of a region:

    peak  = max(driver's use at both ends and at each sample between them, other use at the start + torch's peak of reserved bytes)
    other = what the driver counts as used at the start and torch has not reserved
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch


__all__ = ["GIB", "BusyError", "DeviceMeter", "Measured", "Meter", "Region"]

GIB = 1 << 30
_PAUSE = 0.01
"""Seconds between two samples of the driver's figures."""

_busy: set[object] = set()
"""The devices on which a region is measured now."""
_busy_lock = threading.Lock()


class BusyError(RuntimeError):
    """Another region is measured on the device."""


class Meter(Protocol):
    """A device's memory, in bytes."""

    key: object
    """Which device it is: regions on one are measured one at a time."""

    def synchronize(self) -> None:
        """Waits for all work on the device."""

    def free(self) -> int:
        """What the driver says is free, other processes counted."""

    def total(self) -> int:
        """All there is."""

    def reserved(self) -> int:
        """What PyTorch's allocator holds now."""

    def reset_peak(self) -> None:
        """Forgets the allocator's peak."""

    def peak_reserved(self) -> int:
        """The most that the allocator has held since."""


class DeviceMeter:
    """The figures of a device that streams, and of PyTorch's allocator on it if it is CUDA."""

    def __init__(self, target: Any) -> None:
        """Of a device that was opened."""
        self._target = target
        emulated = target.emulated
        self._cuda = None if emulated else target.device
        self.key: object = ("host", id(target.native)) if emulated else ("cuda", target.device.index)

    def synchronize(self) -> None:
        """Waits for all work on the device."""
        self._target.synchronize()

    def free(self) -> int:
        """What the driver says is free."""
        return self._target.native.free_memory()

    def total(self) -> int:
        """All there is."""
        return self._target.native.total_memory

    def reserved(self) -> int:
        """What PyTorch's allocator holds now; the emulator's memory is not its."""
        return 0 if self._cuda is None else torch.cuda.memory_reserved(self._cuda)

    def reset_peak(self) -> None:
        """Forgets the allocator's peak."""
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)

    def peak_reserved(self) -> int:
        """The most that the allocator has held since."""
        return 0 if self._cuda is None else torch.cuda.max_memory_reserved(self._cuda)


class _Sampler:
    """Asks the driver in between, for what PyTorch's allocator does not count: other libraries, and pages of ours."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._end = threading.Event()
        self.used = 0
        self._thread = threading.Thread(target=self._run, name="weightstream-profile", daemon=True)

    def _run(self) -> None:
        while True:
            self.used = max(self.used, self._meter.total() - self._meter.free())
            if self._end.wait(_PAUSE):
                return

    def __enter__(self) -> _Sampler:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()


@dataclass
class Measured:
    """What a region used, in bytes."""

    total: int = 0
    start: int = 0
    end: int = 0
    sampled: int = 0
    torch_peak: int = 0

    @property
    def peak(self) -> int:
        """The most of all figures."""
        return max(self.start, self.end, self.sampled, self.torch_peak)

    def room(self, headroom_gb: float) -> float:
        """What is left beside the peak and the headroom, in GiB; never below 0."""
        return max(0, self.total - self.peak - int(headroom_gb * GIB)) / GIB

    def as_dict(self) -> dict[str, int]:
        """The figures, as profiles keep them."""
        return {
            "driver_start_bytes": self.start,
            "driver_end_bytes": self.end,
            "driver_sampled_bytes": self.sampled,
            "torch_peak_bytes": self.torch_peak,
        }


class Region:
    """A region on a device. Only one at a time: each resets the peaks that another reads."""

    def __init__(self, meter: Meter) -> None:
        """Nothing is measured yet."""
        self._meter = meter
        self._sampler: _Sampler | None = None

    def sampled(self) -> int:
        """The most bytes that the driver was seen to have in use so far."""
        return 0 if self._sampler is None else self._sampler.used

    @contextmanager
    def measure(self) -> Iterator[Measured]:
        """Measures the block; the figures are complete if it ends without an exception. RuntimeError if another is measured."""
        meter = self._meter
        with _busy_lock:
            if meter.key in _busy:
                raise BusyError("another region is measured on this device; one at a time gives right peaks")
            _busy.add(meter.key)
        try:
            meter.synchronize()
            total = meter.total()
            used = total - meter.free()
            measured = Measured(total, used)
            other = max(0, used - meter.reserved())
            meter.reset_peak()
            with _Sampler(meter) as self._sampler:
                yield measured
                meter.synchronize()
            measured.end = total - meter.free()
            measured.sampled = self._sampler.used
            measured.torch_peak = other + meter.peak_reserved()
        finally:
            with _busy_lock:
                _busy.discard(meter.key)
