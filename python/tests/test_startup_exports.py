"""Startup timings for other programs, read by readers that share nothing with what writes them."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from weightstream import startup


def slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Reads a Chrome trace as viewers do: the complete events of each track, put on a stack by time. Each gets its `depth`
    and the event `under` it; events that overlap without nesting fail."""
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert isinstance(event["name"], str)
            assert event["ts"] >= 0 and event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append(event)
    found = []
    for events in tracks.values():
        stack: list[dict[str, Any]] = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"], event["args"]["id"])):
            end = event["ts"] + event["dur"]
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"] + 1e-6:
                stack.pop()
            if stack:
                assert end <= stack[-1]["ts"] + stack[-1]["dur"] + 1e-6, "it overlaps without nesting"
            found.append({**event, "depth": len(stack), "under": stack[-1]["name"] if stack else None})
            stack.append(event)
    return found


def names(trace: dict[str, Any], kind: str) -> dict[Any, str]:
    """The names that metadata gives to processes or threads."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "M" and event["name"] == kind]
    return {
        (event["pid"], event["tid"]) if kind == "thread_name" else event["pid"]: event["args"]["name"]
        for event in events
    }


def busy() -> None:
    """Takes more than the clock's resolution."""
    sum(range(2_000))


@pytest.fixture
def report(tmp_path: Path) -> startup.Report:
    """Two merged processes, threads, a failed phase, and one that outlived another."""
    paths = [tmp_path / "0.json", tmp_path / "1.json"]
    for rank, path in enumerate(paths):
        with startup.collect_startup_timings(rank=rank, environment=False) as timings:
            with startup.phase("pipeline.create"):
                with startup.phase("component.vae") as vae:
                    vae.count("tensors", 12)
                    busy()
                handle = startup.current()
                late = startup.phase("late; with a space", parent=handle)
                threads = [threading.Thread(target=handle.run, args=(one_phase,), name=f"loader {n}") for n in range(2)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                late.__enter__()
                busy()
            busy()
            late.__exit__(None, None, None)
            with pytest.raises(MemoryError), startup.phase("first_request"):
                busy()
                raise MemoryError
        timings.save(path)
    return startup.merge(paths)


def one_phase() -> None:
    """What loader threads do."""
    with startup.phase("read"):
        busy()


def test_the_chrome_trace_is_what_viewers_read(report: startup.Report) -> None:
    trace = json.loads(report.render("chrome"))
    phases = report.to_dict()["phases"]
    found = slices(trace)
    assert len(found) == len(phases)
    by_id = {event["args"]["id"]: event for event in found}
    for phase in phases:
        event = by_id[phase["id"]]
        assert event["name"] == phase["name"] and event["pid"] == phase["process"]
        # Microseconds.
        assert abs(event["ts"] - phase["start_offset"] * 1e6) < 1e-3
        assert abs(event["dur"] - phase["duration"] * 1e6) < 1e-3
        assert event["args"]["status"] == phase["status"]
    assert names(trace, "process_name") == {0: "rank 0", 1: "rank 1"}
    threads = names(trace, "thread_name")
    assert {(event["pid"], event["tid"]) for event in found} <= set(threads)
    assert {"MainThread", "loader 0", "loader 1"} <= set(threads.values())
    assert by_id[3]["name"] == "component.vae" and by_id[3]["under"] == "pipeline.create"
    failed = [event for event in found if event["name"] == "first_request"]
    assert all(event["args"]["error_type"] == "MemoryError" for event in failed)
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert {"tensors", "memory.anonymous"} <= {event["name"] for event in counters}
    assert all(isinstance(event["args"]["value"], int) for event in counters)
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "M", "C"}


def test_folded_stacks_sum_to_the_exclusive_times(report: startup.Report) -> None:
    total = 0
    paths = set()
    for line in report.render("folded").splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        assert frames[0] in ("rank_0", "rank_1") and all(frames)
        paths.add(stack)
        total += int(count)
    exclusive = sum(phase["exclusive"] for phase in report.to_dict()["phases"])
    assert abs(total / 1e9 - exclusive) < 1e-6
    assert "rank_0;pipeline.create;component.vae" in paths
    assert "rank_0;late:_with_a_space" in paths


def test_every_format_is_written_whole(report: startup.Report, tmp_path: Path) -> None:
    for format in ("json", "chrome", "folded", "table"):
        report.save(tmp_path / format, format)
        assert (tmp_path / format).read_text() == report.render(format)
    assert startup.load(tmp_path / "json").to_dict() == report.to_dict()
