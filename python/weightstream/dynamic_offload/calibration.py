"""Named profiles: looked up at set-up, measured and recorded by a calibration.

What is measured is the most that was in use on the device between the two ends of a region:

    peak  = max(driver's use at both ends and at each sample between them, other use at the start + torch's peak of reserved bytes)
    other = what the driver counts as used at the start and torch has not reserved
    recommendation = max(0, total - peak - headroom)

A calibration runs with the base and the transit ring alone, so that the recommendation is what residents may take beside them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from .config import DynamicOffloadConfig
from .profiles import (
    get_dynamic_offload_profile_recommendation,
    load_dynamic_offload_profile,
    record_dynamic_offload_profile,
    dynamic_offload_profile_path,
)

__all__ = ["DeviceMeter", "Meter", "NamedProfile"]

GIB = 1 << 30
_PAUSE = 0.01
"""Seconds between two samples of the driver's figures."""
_DIGITS = 4
"""Digits of a recommendation in GiB."""

_busy: set[object] = set()
"""The devices on which a region is measured now."""
_busy_lock = threading.Lock()


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
class NamedProfile:
    """A module's profile, from set-up to the end of a calibration."""

    module: nn.Module
    name: str
    build: bool
    headroom_gb: float
    execution_mode: str
    report: dict[str, Any] = field(default_factory=dict)
    meter: Meter | None = None
    _sampler: _Sampler | None = None
    _ran: bool = False

    @classmethod
    def of(cls, module: nn.Module, config: DynamicOffloadConfig) -> NamedProfile:
        """The profile that a configuration names, not looked up yet; one without a name does nothing."""
        name = config.profile_name.strip()
        profile = cls(module, name, config.build_profile, config.profile_vram_headroom_gb, config.execution_mode)
        profile.report = {"name": name, "status": "disabled"}
        return profile

    @property
    def context(self) -> dict[str, str]:
        """The identity: the name and the class's qualified name."""
        return {"name": self.name, "model_class": type(self.module).__qualname__}

    def budget(self, config: DynamicOffloadConfig, manual: bool) -> float:
        """The resident budget in GiB: 0 in a calibration, the caller's own, or what the profile recommends."""
        cap = config.max_resident_module_budget_gb
        if self.build:
            self.report.update(status="calibrating", path=str(dynamic_offload_profile_path(self.context)))
            return 0.0
        own = config.resident_module_budget_gb
        if not self.name:
            return own
        if manual and own > 0:
            self.report.update(reason="a resident budget was given, which a profile does not replace")
            return own
        profile = load_dynamic_offload_profile(self.context)
        advice = get_dynamic_offload_profile_recommendation(profile or {}) or {}
        budget = advice.get("resident_module_budget_gb")
        if budget is None:
            self.report.update(status="missing", reason=f"no profile {self.name!r} of {type(self.module).__qualname__}")
            return own
        applied = min(budget, cap) if cap > 0 else budget
        self.report.update(
            status="applied",
            recommendation=advice,
            resident_module_budget_gb=applied,
            profile_measurement_kind=advice.get("profile_measurement_kind"),
        )
        return applied

    def sampled(self) -> int:
        """The most bytes that the driver was seen to have in use in the region."""
        return 0 if self._sampler is None else self._sampler.used

    @contextmanager
    def run(self) -> Iterator[dict[str, Any]]:
        """The region. Measured and recorded if a profile is built, and otherwise nothing is done."""
        if not self.build or self.meter is None:
            yield self.report
            return
        meter = self.meter
        with _busy_lock:
            if self._ran:
                raise RuntimeError(
                    f"the profile {self.name!r} was measured already; enable the offload again to measure anew"
                )
            if meter.key in _busy:
                raise RuntimeError("another region is measured on this device; one at a time gives right peaks")
            _busy.add(meter.key)
            self._ran = True
        try:
            yield from self._measured(meter)
        except BaseException:
            self.report["status"] = "failed"
            raise
        finally:
            with _busy_lock:
                _busy.discard(meter.key)

    def _measured(self, meter: Meter) -> Iterator[dict[str, Any]]:
        meter.synchronize()
        total, used = meter.total(), meter.total() - meter.free()
        other = max(0, used - meter.reserved())
        meter.reset_peak()
        with _Sampler(meter) as self._sampler:
            sampler = self._sampler
            yield self.report
            meter.synchronize()
        used_after = total - meter.free()
        torch_peak = other + meter.peak_reserved()
        peak = max(used, used_after, sampler.used, torch_peak)
        headroom = int(self.headroom_gb * GIB)
        budget = round(max(0, total - peak - headroom) / GIB, _DIGITS)
        observation = {
            "status": "observed",
            "peak_vram_gb": peak / GIB,
            "total_vram_gb": total / GIB,
            "headroom_gb": self.headroom_gb,
            "profile_measurement_kind": "baseline",
            "measurement": {
                "driver_start_bytes": used,
                "driver_end_bytes": used_after,
                "driver_sampled_bytes": sampler.used,
                "torch_peak_bytes": torch_peak,
            },
        }
        advice = {
            "resident_module_budget_gb": budget,
            "execution_mode": self.execution_mode,
            "profile_measurement_kind": "baseline",
        }
        path = record_dynamic_offload_profile(self.context, observation, None, advice)
        self.report.update(observation, status="saved", path=str(path), recommendation=advice)
