"""What an offloaded module tells of itself: a detached report, and a journal of such reports in files."""

from __future__ import annotations

import copy
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Union

__all__ = ["DYNAMIC_OFFLOAD_METRICS_SCHEMA_VERSION", "DynamicOffloadMetrics", "DynamicOffloadMetricsJournal"]

DYNAMIC_OFFLOAD_METRICS_SCHEMA_VERSION = 1
"""The version of reports."""


@dataclass(frozen=True)
class DynamicOffloadMetrics:
    """A report: what was configured, what set-up did, and what has run. It holds no tensor and follows no change."""

    route: str
    configuration: Mapping[str, Any] = field(default_factory=dict)
    setup: Mapping[str, Any] = field(default_factory=dict)
    runtime: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Detaches the report from what it was made of; TypeError or ValueError for what JSON does not have."""
        for name in ("configuration", "setup", "runtime"):
            detached = json.loads(json.dumps(dict(getattr(self, name)), allow_nan=False))
            object.__setattr__(self, name, MappingProxyType(detached))

    @property
    def schema_version(self) -> int:
        """The version of this report."""
        return DYNAMIC_OFFLOAD_METRICS_SCHEMA_VERSION

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON has it, which is the caller's to change."""
        parts = {name: copy.deepcopy(dict(getattr(self, name))) for name in ("configuration", "setup", "runtime")}
        return {"schema_version": self.schema_version, "route": self.route, **parts}

    def format_profile(self) -> str:
        """The report as text."""
        lines = [f"route: {self.route}"]
        for name in ("configuration", "setup", "runtime"):
            lines += [f"{name}.{key}: {json.dumps(value)}" for key, value in sorted(getattr(self, name).items())]
        return "\n".join(lines)


class DynamicOffloadMetricsJournal:
    """Reports in files of a folder: `before_denoise.json`, then `step_0000.json` and so on. Each is there whole or not at all
    and is never replaced. Not enabled, it creates nothing. It waits for no device."""

    def __init__(
        self,
        snapshot: Callable[[], DynamicOffloadMetrics],
        directory: Union[str, os.PathLike],
        *,
        enabled: bool = False,
    ) -> None:
        """Made by `metrics_journal` of a result."""
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled={enabled!r} is neither True nor False")
        self._snapshot = snapshot
        self._folder = Path(directory)
        self._enabled = enabled
        self._closed = False
        self._start = time.perf_counter()

    def __enter__(self) -> DynamicOffloadMetricsJournal:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed = True

    def record(self, step_index: int | None = None) -> Path | None:
        """Writes the report of now, before all steps or after one. FileExistsError if there is one already."""
        if step_index is not None and (
            isinstance(step_index, bool) or not isinstance(step_index, int) or step_index < 0
        ):
            raise ValueError(f"step_index={step_index!r} is no number of a step")
        if self._closed:
            raise RuntimeError("the journal is closed")
        if not self._enabled:
            return None
        name = "before_denoise.json" if step_index is None else f"step_{step_index:04d}.json"
        content = {
            "schema_version": DYNAMIC_OFFLOAD_METRICS_SCHEMA_VERSION,
            "observation": "before_denoise" if step_index is None else "after_step",
            "step_index": step_index,
            "host_elapsed_seconds": time.perf_counter() - self._start,
            "gpu_completion_proven": False,
            "completion_collection_requested": False,
            "metrics": self._snapshot().as_dict(),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        return write_new(self._folder / name, json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n")


def write_new(path: Path, text: str) -> Path:
    """Writes a file, whole or not at all, where none is: FileExistsError otherwise."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex}.tmp")
    try:
        with open(unfinished, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if os.name == "nt":
            os.rename(unfinished, path)
        else:
            os.link(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path
