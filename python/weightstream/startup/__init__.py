"""Where the seconds before the first step go.

    from weightstream import startup

    with startup.collect_startup_timings() as timings:
        with startup.phase("pipeline.create"):
            pipeline = build_pipeline()
        with startup.phase("first_request"):
            pipeline("a prompt")
    timings.save("start.json")                    # python -m weightstream.startup show start.json

Loading and attaching of this package record phases of their own meanwhile; without a collector a phase costs less than a
microsecond and leaves nothing behind. Importing this imports no PyTorch and patches nothing.
"""

from __future__ import annotations

from ..errors import TimingError
from .collecting import StartupTimings, collect_startup_timings, describe_checkpoint, synchronize_cuda
from .phases import Handle, current, phase
from .reports import Report, diff, load, merge, stats

__all__ = [
    "Handle",
    "Report",
    "StartupTimings",
    "TimingError",
    "collect_startup_timings",
    "current",
    "describe_checkpoint",
    "diff",
    "load",
    "merge",
    "phase",
    "stats",
    "synchronize_cuda",
]
