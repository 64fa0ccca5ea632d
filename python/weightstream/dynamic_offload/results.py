"""What the functions that offload return: the module, how it is offloaded, and what can be asked of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Union

from torch import nn

from .metrics import DynamicOffloadMetrics, DynamicOffloadMetricsJournal
from .named import NamedProfile
from .settings import DynamicOffloadSettings
from .state import Applied, remove_dynamic_offload

__all__ = ["DynamicOffloadApplyResult", "DynamicOffloadLoadResult"]

log = logging.getLogger("weightstream.dynamic_offload")


class _Runs:
    """The region that is measured when a profile is built."""

    _profile: NamedProfile | None
    settings: DynamicOffloadSettings | None
    metrics_snapshot: Callable[..., DynamicOffloadMetrics]

    @contextmanager
    def profile_run(self) -> Iterator[dict[str, Any] | None]:
        """The workload. Where a profile is built, the region is measured and, if it ends well, recorded; a region in which
        nothing of the module ran to its end is not, and warns. Otherwise this does nothing. Gives a report that JSON can hold
        and that is complete when the region ends; None without such a runtime.

        With `show_profile` the whole report goes to the log "weightstream.dynamic_offload" then."""
        if self._profile is None:
            yield None
            return
        with self._profile.run() as report:
            yield report
        settings = self.settings
        if settings is not None and settings.config.show_profile:
            log.info("%s", self.metrics_snapshot().format_profile())


@dataclass
class DynamicOffloadApplyResult(_Runs):
    """What `enable_offload` returns."""

    module: nn.Module
    hook: Any = None
    settings: DynamicOffloadSettings | None = None
    should_move_to_execution_device: bool = True
    event_payload: dict[str, Any] = field(default_factory=dict)
    route: str = "dynamic_offload"
    _profile: NamedProfile | None = field(default=None, repr=False)
    _applied: Applied | None = field(default=None, repr=False)

    @contextmanager
    def cleanup_on_error(self) -> Iterator[DynamicOffloadApplyResult]:
        """Removes the offload if the block fails, and raises what it raised; a failure of the removal is a note on that."""
        try:
            yield self
        except BaseException as error:
            try:
                remove_dynamic_offload(self.module)
            except BaseException as second:  # noqa: BLE001
                note = f"removing the offload failed too: {type(second).__name__}: {second}"
                if hasattr(error, "add_note"):
                    error.add_note(note)
                else:
                    error.dynamic_offload_cleanup_error = note  # type: ignore[attr-defined]
            raise

    def metrics_snapshot(
        self, *, collect_completed: bool = False, execution_timing: Any = None
    ) -> DynamicOffloadMetrics:
        """The report of now. It waits for no device and holds no tensor."""
        if collect_completed or execution_timing is not None:
            raise ValueError(
                "collect_completed and execution_timing are not offered: reports count what the host has issued"
            )
        runtime = self._applied.runtime() if self._applied is not None else {}
        setup = dict(self.event_payload)
        if self._profile is not None:
            setup["profile"] = self._profile.report
        configuration = self.settings.as_metrics() if self.settings is not None else {}
        return DynamicOffloadMetrics(self.route, configuration, setup, runtime)

    def metrics_journal(
        self, directory: Union[str, os.PathLike], *, enabled: bool = False
    ) -> DynamicOffloadMetricsJournal:
        """A journal of such reports in a folder."""
        return DynamicOffloadMetricsJournal(self.metrics_snapshot, directory, enabled=enabled)


@dataclass
class DynamicOffloadLoadResult(_Runs):
    """What `from_pretrained_with_dynamic_offload` returns."""

    module: nn.Module
    hook: Any = None
    should_move_to_execution_device: bool = True
    _profile: NamedProfile | None = field(default=None, repr=False)
    _apply: DynamicOffloadApplyResult | None = field(default=None, repr=False)

    @property
    def settings(self) -> DynamicOffloadSettings | None:  # type: ignore[override]
        """How it was offloaded."""
        return None if self._apply is None else self._apply.settings

    def metrics_snapshot(self) -> DynamicOffloadMetrics:
        """The report of the offload; of a module that was only loaded, that it is."""
        return DynamicOffloadMetrics("loaded") if self._apply is None else self._apply.metrics_snapshot()
