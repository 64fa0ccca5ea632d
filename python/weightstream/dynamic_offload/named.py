"""Named profiles: looked up at set-up, measured and kept by a calibration, and for SDNQ settled by a probe.

A calibration runs with the base and the transit ring alone, so that what is recommended is what residents may take beside them:
max(0, total - peak - headroom). For SDNQ a larger budget may be worth a try: the profile then keeps the safe value and the one to
try, set-up applies the safe one, and the next `profile_run` tries the other, measures it and keeps what came of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..levels import levels_outside
from .calibration import GIB, BusyError, Measured, Meter, Region
from .config import DynamicOffloadConfig
from .profiles import (
    dynamic_offload_profile_path,
    get_dynamic_offload_profile_recommendation,
    load_dynamic_offload_profile,
    record_dynamic_offload_profile,
)
from .watching import Ran

__all__ = ["NamedProfile"]

BASELINE, SAFE, PENDING, PROBED = "baseline", "sdnq_baseline_safe", "sdnq_baseline_probe_pending", "sdnq_probe"
"""Kinds of measurements."""
LEAST_FOR_A_PROBE = 2.0
"""GiB of measured room below which more is not tried."""
MOST_PROBED = 6.0
"""GiB that are tried at most, unless the cap says otherwise."""
_DIGITS = 4
"""Digits of a recommendation in GiB."""


class _TakenOffError(RuntimeError):
    """The module is no longer offloaded."""


@dataclass
class NamedProfile:
    """A module's profile, from set-up to the end of a calibration."""

    module: nn.Module
    name: str
    build: bool
    headroom_gb: float
    execution_mode: str
    cap_gb: float
    report: dict[str, Any] = field(default_factory=dict)
    meter: Meter | None = None
    stream: Callable[[float], None] | None = None
    """Streams the module with another resident budget."""
    watch: Callable[[], AbstractContextManager[Ran]] | None = None
    """Watches whether anything of the module runs."""
    region: Region | None = None
    _probe: tuple[float, float] | None = None
    """What is to be tried, and what is safe."""
    _ran: bool = False

    @classmethod
    def of(cls, module: nn.Module, config: DynamicOffloadConfig) -> NamedProfile:
        """The profile that a configuration names, not looked up yet; one without a name does nothing."""
        name = config.profile_name.strip()
        profile = cls(
            module,
            name,
            config.build_profile,
            config.profile_vram_headroom_gb,
            config.execution_mode,
            config.max_resident_module_budget_gb,
        )
        profile.report = {"name": name, "status": "disabled"}
        return profile

    @property
    def context(self) -> dict[str, str]:
        """The identity: the name and the class's qualified name."""
        return {"name": self.name, "model_class": type(self.module).__qualname__}

    def budget(self, config: DynamicOffloadConfig, manual: bool) -> float:
        """The resident budget in GiB: 0 in a calibration, the caller's own, or what the profile recommends."""
        if self.build:
            self.report.update(status="calibrating", path=str(dynamic_offload_profile_path(self.context)))
            return 0.0
        own = config.resident_module_budget_gb
        if not self.name:
            return own
        if manual and own > 0:
            self.report.update(reason="a resident budget was given, which a profile does not replace")
            return own
        advice = get_dynamic_offload_profile_recommendation(load_dynamic_offload_profile(self.context) or {}) or {}
        budget = advice.get("resident_module_budget_gb")
        if budget is None:
            self.report.update(status="missing", reason=f"no profile {self.name!r} of {type(self.module).__qualname__}")
            return own
        kind = advice.get("profile_measurement_kind")
        if kind == PENDING and self.execution_mode == "sdnq_runtime" and "sdnq_probe_resident_budget_gb" in advice:
            self._probe = (self._capped(advice["sdnq_probe_resident_budget_gb"]), self._capped(budget))
        self.report.update(
            status="applied" if self._probe is None else "probing",
            recommendation=advice,
            resident_module_budget_gb=self._capped(budget),
            profile_measurement_kind=kind,
        )
        return self._capped(budget)

    def _capped(self, budget: float) -> float:
        return min(budget, self.cap_gb) if self.cap_gb > 0 else budget

    @contextmanager
    def run(self) -> Iterator[dict[str, Any]]:
        """The region: measured and kept if a profile is built or a probe is pending; otherwise nothing is done."""
        if not self.build and self._probe is None:
            yield self.report
            return
        if self._ran:
            if self._probe is not None:
                yield self.report
                return
            raise RuntimeError(
                f"the profile {self.name!r} was measured already; enable the offload again to measure anew"
            )
        if self.meter is None or self.stream is None:
            raise RuntimeError("the offload was taken off; enable it again to measure")
        with self._probed() if self._probe is not None else self._calibrated() as report:
            yield report

    @contextmanager
    def _calibrated(self) -> Iterator[dict[str, Any]]:
        assert self.meter is not None and self.watch is not None
        self.region = Region(self.meter)
        with self.watch() as ran, self.region.measure() as measured:
            self._ran = True
            try:
                yield self.report
                self._check_on()
            except BaseException:
                self.report["status"] = "failed"
                self._ran = False
                raise
        if not ran():
            self._unmeasured()
            return
        safe = round(measured.room(self.headroom_gb), _DIGITS)
        advice: dict[str, Any] = {"resident_module_budget_gb": safe, "profile_measurement_kind": BASELINE}
        if self.execution_mode == "sdnq_runtime":
            most = self.cap_gb if self.cap_gb > 0 else MOST_PROBED
            probe = round(min(most, measured.total / GIB - self.headroom_gb), _DIGITS)
            advice["profile_measurement_kind"] = SAFE
            if safe >= LEAST_FOR_A_PROBE and probe > safe:
                advice.update(profile_measurement_kind=PENDING, sdnq_probe_resident_budget_gb=probe)
        self._keep(measured, advice, "saved")

    @contextmanager
    def _probed(self) -> Iterator[dict[str, Any]]:
        """Tries the larger budget. Where that fails, the safe one is back, on the module and in the profile."""
        assert self._probe is not None and self.stream is not None and self.meter is not None and self.watch is not None
        probe, safe = self._probe
        fallback = {"resident_module_budget_gb": safe, "profile_measurement_kind": SAFE}
        try:
            self.stream(probe)
            self.region = Region(self.meter)
            with self.watch() as ran, self.region.measure() as measured:
                self._ran = True
                yield self.report
                self._check_on()
        except BaseException as error:
            self.report["status"] = "failed"
            if self.stream is not None:
                self.stream(safe)
            if isinstance(error, Exception) and not isinstance(error, (BusyError, _TakenOffError)):
                self._keep(None, fallback, "failed")
            raise
        if not ran():
            self.stream(safe)
            self._unmeasured()
            return
        over = max(0, measured.peak - (measured.total - int(self.headroom_gb * GIB)))
        settled = round(max(0.0, probe - over / GIB), _DIGITS)
        self._keep(measured, {"resident_module_budget_gb": settled, "profile_measurement_kind": PROBED}, "saved")

    def _check_on(self) -> None:
        if self.stream is None:
            raise _TakenOffError("the offload was taken off inside the region: nothing was measured, nothing is kept")

    def _unmeasured(self) -> None:
        """Says that nothing of the module ran to its end. What is kept stays as it is, and the region may be run again."""
        self._ran = False
        reason = (
            f"nothing of this {type(self.module).__name__} ran to its end inside profile_run(), so nothing was measured and the "
            f"profile {self.name!r} is as it was; run the workload inside the region"
        )
        self.report.update(status="unmeasured", reason=reason)
        warnings.warn(f"a workload's profile: {reason}", RuntimeWarning, stacklevel=levels_outside())

    def _keep(self, measured: Measured | None, advice: dict[str, Any], status: str) -> None:
        advice = {**advice, "execution_mode": self.execution_mode}
        observation: dict[str, Any] = {"profile_measurement_kind": advice["profile_measurement_kind"]}
        if measured is not None:
            observation.update(
                peak_vram_gb=measured.peak / GIB,
                total_vram_gb=measured.total / GIB,
                headroom_gb=self.headroom_gb,
                measurement=measured.as_dict(),
            )
        seen = {"status": "failed" if measured is None else "observed", **observation}
        path = record_dynamic_offload_profile(self.context, seen, None, advice)
        self.report.update(observation, status=status, path=str(path), recommendation=advice)
