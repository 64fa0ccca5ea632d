"""Startup timings of several processes: collected by each, merged on one clock; killed ones leave what they did."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from weightstream import startup
from weightstream.errors import TimingError

WORKER = """
    import sys
    from weightstream import startup

    rank, path = int(sys.argv[1]), sys.argv[2]
    with startup.collect_startup_timings(path=path, rank=rank, environment=False):
        with startup.phase("component.vae"):
            with startup.phase(f"loaded by {rank}"):
                pass
"""


def spawned(script: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """A process that runs the script."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    variables = {**os.environ, **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)


def test_spawned_workers_collect_for_themselves_and_merge_into_one_tree(tmp_path: Path) -> None:
    paths = [tmp_path / f"rank{rank}.jsonl" for rank in range(4)]
    with startup.collect_startup_timings(name="driver", environment=False) as driver, startup.phase("launch"):
        workers = [spawned(WORKER, rank, path) for rank, path in enumerate(paths)]
        for worker in workers:
            worker.communicate(timeout=300)
            assert worker.returncode == 0
    # A driver sees nothing of its workers.
    assert [phase["name"] for phase in driver.to_dict()["phases"]] == ["launch"]
    driver.save(tmp_path / "driver.json")
    merged = startup.merge([tmp_path / "driver.json", *reversed(paths)], tmp_path / "merged.json").to_dict()
    assert merged == startup.load(tmp_path / "merged.json").to_dict()
    assert merged["complete"]
    processes = merged["processes"]
    assert [facts["rank"] for facts in processes] == [0, 1, 2, 3, None]
    assert processes[4]["name"] == "driver"
    assert len({facts["pid"] for facts in processes}) == 5
    tree: dict[Any, list[dict[str, Any]]] = {}
    for phase in merged["phases"]:
        tree.setdefault(phase["parent_id"], []).append(phase)
    roots = {phase["name"]: phase for phase in tree[None]}
    assert set(roots) == {"rank 0", "rank 1", "rank 2", "rank 3", "driver"}
    launch = tree[roots["driver"]["id"]][0]
    for rank in range(4):
        root = roots[f"rank {rank}"]
        (component,) = tree[root["id"]]
        (loaded,) = tree[component["id"]]
        assert (component["name"], loaded["name"]) == ("component.vae", f"loaded by {rank}")
        # On one clock: workers run while the driver waits for them.
        begin, end = root["start_offset"], root["start_offset"] + root["duration"]
        assert launch["start_offset"] < begin <= component["start_offset"] <= loaded["start_offset"]
        assert end < launch["start_offset"] + launch["duration"]


def test_missing_cut_and_foreign_files_are_reported(tmp_path: Path) -> None:
    whole, cut, foreign = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl", tmp_path / "foreign.json"
    for rank, path in enumerate([whole, cut]):
        with startup.collect_startup_timings(path=path, rank=rank, environment=False):
            with startup.phase("load"):
                with startup.phase("read"):
                    pass
    text = cut.read_bytes()
    cut.write_bytes(text[: text.index(b'"event":"end"') + 5])
    foreign.write_text('{"traceEvents": []}')
    merged = startup.merge([whole, tmp_path / "missing.jsonl", cut, foreign])
    report = merged.to_dict()
    assert not report["complete"]
    states = {os.path.basename(facts["file"]): facts["state"] for facts in report["processes"]}
    assert states == {
        "whole.jsonl": "complete",
        "cut.jsonl": "partial",
        "missing.jsonl": "missing",
        "foreign.json": "unreadable",
    }
    assert [phase["status"] for phase in report["phases"] if phase["process"] == 1] == ["open"] * 3
    shown = str(merged)
    assert "missing.jsonl" in shown and "the file ends within a line" in shown
    with pytest.raises(TimingError, match="nothing to merge"):
        startup.merge([foreign, tmp_path / "missing.jsonl"])
    with pytest.raises(TimingError, match="nothing to merge"):
        startup.merge([])


def test_a_killed_process_leaves_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "killed.jsonl"
    script = """
        import sys, time
        from weightstream import startup

        with startup.collect_startup_timings(path=sys.argv[1]):
            with startup.phase("done"):
                pass
            with startup.phase("component.transformer"), startup.phase("transformer.hydrate"):
                print("ready", flush=True)
                time.sleep(600)
    """
    worker = spawned(script, path, RANK="3")
    assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    worker.send_signal(signal.SIGKILL)
    worker.communicate(timeout=60)
    report = startup.load(path).to_dict()
    assert not report["complete"] and report["processes"][0]["state"] == "partial"
    assert report["processes"][0]["rank"] == 3
    found = [(phase["name"], phase["status"]) for phase in report["phases"]]
    assert found == [("done", "success"), ("component.transformer", "open"), ("transformer.hydrate", "open")]
    assert report["environment"]["python"]


def test_importing_and_collecting_needs_no_torch(tmp_path: Path) -> None:
    script = """
        import sys, threading
        import weightstream
        from weightstream import startup

        with startup.collect_startup_timings() as timings:
            with startup.phase("import torch"):
                assert "torch" not in sys.modules
                import torch
        assert threading.active_count() == 1
        timings.save(sys.argv[1])
        assert weightstream.attach is not None and callable(weightstream.attach)
        assert callable(weightstream.offload.load_sd) and "attach" in dir(weightstream)
        from weightstream import *
        assert callable(attach) and HostDevice is weightstream.HostDevice
        try:
            weightstream.nothing
        except AttributeError as error:
            assert "nothing" in str(error)
        else:
            raise AssertionError
    """
    worker = spawned(script, tmp_path / "a.json")
    worker.communicate(timeout=300)
    assert worker.returncode == 0
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["phases"][0]["name"] == "import torch" and report["phases"][0]["duration"] > 0
    assert report["environment"]["torch"] and report["environment"]["cuda_initialized"] is False
    # What came before the collector is told, too.
    assert report["processes"][0]["age"] > 0
