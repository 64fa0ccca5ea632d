"""What collecting startup timings costs a start: the phases of a whole pipeline's start, times what one phase costs, over the
time from the process's beginning to its first request's end.

    python tools/bench/startup.py                       # a tiny pipeline: the least that a start can take
    python tools/bench/startup.py --model-path FOLDER   # a real one

The difference of two end-to-end times would say nothing: starts differ by more than collecting costs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from weightstream import startup

SCRIPT = Path(__file__).parents[2] / "examples" / "benchmark" / "wan_pipeline_startup.py"
PHASES = 2_000
"""Phases that one cost is measured over, after as many that are not counted."""
LIMIT = 0.01
"""The share that collecting may take."""


def phases(count: int) -> float:
    """Seconds a phase takes that lies in another, as most do."""
    with startup.phase("component.vae"):
        begun = time.perf_counter()
        for _ in range(count):
            with startup.phase("vae.construct"):
                pass
        return (time.perf_counter() - begun) / count


def costs(folder: Path) -> dict[str, float]:
    """What a phase costs, by what is collected, in seconds. The best of five: other processes only add."""
    import torch  # noqa: F401  whose device memory is asked about where it is imported

    found = {"off": min(phases(PHASES) for _ in range(5))}
    for name, options in [
        ("times", {"counters": False}),
        ("times and counters", {}),
        ("times, counters and a file", {"path": folder / "recording.jsonl"}),
    ]:
        best = float("inf")
        for _ in range(5):
            with startup.collect_startup_timings(environment=False, **options):
                phases(PHASES // 10)
                best = min(best, phases(PHASES))
        found[name] = best
    begun = time.perf_counter()
    with startup.collect_startup_timings():
        pass
    found["a collector with its environment, once"] = time.perf_counter() - begun
    return found


def start(folder: Path, model: Path | None) -> dict[str, Any]:
    """The report of one start."""
    output = folder / "start.json"
    source = ["--tiny"] if model is None else ["--model-path", str(model)]
    subprocess.run(
        [sys.executable, str(SCRIPT), *source, "--output", str(output)], check=True, stdout=subprocess.DEVNULL
    )
    return json.loads(output.read_text())


def measure(model: Path | None) -> dict[str, Any]:
    """Costs, a start, and the share."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        report = start(folder, model)
        cost = costs(folder)
    count, whole = len(report["phases"]), report["duration"]
    collected = count * cost["times, counters and a file"] + cost["a collector with its environment, once"]
    return {
        "costs_seconds": cost,
        "phases": count,
        "start_seconds": whole,
        "collecting_seconds": collected,
        "share": collected / whole,
        "limit": LIMIT,
        "within": collected / whole < LIMIT,
        "environment": report["environment"],
    }


def main() -> int:
    """Prints the result; 1 if collecting takes more than it may."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", type=Path, help="a Wan pipeline as diffusers saves it; else a tiny one is made")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    parser.add_argument("--commit", default="", help="what is measured, for the result")
    options = parser.parse_args()
    result = {**measure(options.model_path), "commit": options.commit}
    for name, seconds in result["costs_seconds"].items():
        what = name if "once" in name else f"a phase, {name}"
        print(f"{what:<42}{seconds * 1e6:>10.2f} µs")
    print(
        f"{result['phases']} phases in a start of {result['start_seconds']:.2f} s: collecting takes "
        f"{result['collecting_seconds'] * 1e3:.2f} ms, {100 * result['share']:.3f} % of it"
    )
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["within"] else 1


if __name__ == "__main__":
    sys.exit(main())
