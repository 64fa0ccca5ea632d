"""The journal: whole records only, never replaced, nothing where it is not enabled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from dynamic_models import DEVICE, TOKENS, plain, resident

from weightstream import dynamic_offload as ddo


def result() -> ddo.DynamicOffloadApplyResult:
    return ddo.enable_offload(plain(), route="dynamic", execution_device=DEVICE, environ={})


def test_records_before_and_after_each_step(tmp_path: Path) -> None:
    offload = result()
    folder = tmp_path / "a" / "b"
    with offload.metrics_journal(folder, enabled=True) as journal:
        assert journal.record() == folder / "before_denoise.json"
        for step in range(3):
            resident(offload.module, TOKENS)
            journal.record(step)
    names = ["before_denoise.json", *(f"step_000{step}.json" for step in range(3))]
    assert sorted(path.name for path in folder.iterdir()) == names
    records = [json.loads((folder / name).read_text()) for name in names]
    assert [record["step_index"] for record in records] == [None, 0, 1, 2]
    steps = [record["metrics"]["runtime"]["copy_runtime"]["linear_parameter"]["calls"] for record in records]
    assert steps == sorted(steps) and all(record["gpu_completion_proven"] is False for record in records)
    with pytest.raises(RuntimeError, match="closed"):
        journal.record(3)


def test_a_record_is_never_replaced(tmp_path: Path) -> None:
    journal = result().metrics_journal(tmp_path, enabled=True)
    path = journal.record(7)
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        journal.record(7)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["step_0007.json"]
    for wrong in (-1, True, "1", 1.0):
        with pytest.raises(ValueError, match="step_index"):
            journal.record(wrong)


def test_not_enabled_it_creates_nothing(tmp_path: Path) -> None:
    with result().metrics_journal(tmp_path / "none") as journal:
        assert journal.record() is None and journal.record(0) is None
    assert not (tmp_path / "none").exists()


def test_a_killed_process_leaves_whole_records_only(tmp_path: Path) -> None:
    code = """
        import os, signal, sys
        sys.path.insert(0, sys.argv[1])
        from pathlib import Path
        from weightstream.dynamic_offload import metrics
        snapshot = lambda: metrics.DynamicOffloadMetrics("r", {"x": "y" * 100_000})
        journal = metrics.DynamicOffloadMetricsJournal(snapshot, sys.argv[2], enabled=True)
        journal.record()
        calls = {"fsync": 1, "link": 2}
        for name, step in calls.items():
            if name == sys.argv[3]:
                setattr(os, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            journal.record(step)
    """
    for call, whole in (("fsync", ["before_denoise.json"]), ("link", ["before_denoise.json", "step_0001.json"])):
        folder = tmp_path / call
        command = [sys.executable, "-c", textwrap.dedent(code), str(Path(__file__).parent), str(folder), call]
        ended = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, check=False)
        assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
        assert sorted(path.name for path in folder.glob("*.json")) == whole
        assert all(json.loads((folder / name).read_text())["metrics"] for name in whole)
