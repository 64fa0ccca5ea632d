"""`python -m weightstream.startup`, and what several runs say."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightstream import startup
from weightstream.errors import TimingError
from weightstream.startup.__main__ import main


def made(path: Path, noise: random.Random, slow: float = 1.0, failed: bool = False) -> None:
    """A report of a start of ten phases of about 100 ms, one of them slower by a factor."""
    at = 0.0
    phases: list[dict[str, Any]] = []
    for number in range(10):
        taken = 0.1 * (1 + noise.gauss(0, 0.02)) * (slow if number == 4 else 1.0)
        phases.append(phase(number + 2, 1, f"part {number}", at, taken))
        at += taken
    phases.insert(0, phase(1, None, "pipeline.create", 0.0, at, status="error" if failed else "success"))
    report = {
        "schema": "weightstream.startup",
        "schema_version": 1,
        "complete": True,
        "duration": at,
        "clock": {"monotonic_origin": 0, "unix_origin": 0},
        "processes": [{"pid": 1}],
        "phases": phases,
    }
    path.write_text(json.dumps(report))


def phase(
    number: int, parent: Any, name: str, start: float, duration: float, status: str = "success"
) -> dict[str, Any]:
    """One phase as files have it."""
    return {
        "id": number,
        "parent_id": parent,
        "name": name,
        "start_offset": start,
        "duration": duration,
        "status": status,
    }


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Folders of eight runs: a and b of the same start, c with a phase that is slower by a fifth."""
    noise = random.Random(5)
    for folder, slow in [("a", 1.0), ("b", 1.0), ("c", 1.2)]:
        (tmp_path / folder).mkdir()
        for run in range(8):
            made(tmp_path / folder / f"{run}.json", noise, slow)
    return tmp_path


def test_a_slower_phase_is_marked_and_only_that(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(runs / "a"), str(runs / "c"), "--fail"]) == 1
    marked = [line.split()[1:4] for line in capsys.readouterr().out.splitlines() if line.startswith("SLOWER")]
    assert marked == [["pipeline.create", "/", "part"]]
    assert main(["diff", str(runs / "a"), str(runs / "c"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [one["path"] for one in data["differences"] if one["flagged"]] == ["pipeline.create / part 4"]
    assert main(["diff", str(runs / "a"), str(runs / "b"), "--fail"]) == 0
    assert "SLOWER" not in capsys.readouterr().out


def test_statistics_leave_failed_runs_out(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(runs / "a" / "failed.json", random.Random(6), failed=True)
    assert main(["stats", str(runs / "a"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["runs"], data["failed"]) == (8, 1)
    part = next(one for one in data["phases"] if one["path"] == "pipeline.create / part 4")
    assert part["runs"] == 8 and part["interval"][0] < part["median"] < part["interval"][1]
    assert part["median"] <= part["p90"]
    assert main(["stats", str(runs / "a" / "0.json")]) == 0
    shown = capsys.readouterr().out
    assert "1 runs" in shown and " to " not in shown


def test_show_export_and_merge(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(runs / "a" / "0.json")
    assert main(["show", file]) == 0
    assert "\n  part 4 " in capsys.readouterr().out
    for format in ("chrome", "folded", "json", "table"):
        output = runs / f"out.{format}"
        assert main(["export", file, "--format", format, "-o", str(output)]) == 0
        assert main(["export", file, "--format", format]) == 0
        assert capsys.readouterr().out == output.read_text()
    assert main(["merge", str(runs / "a"), str(runs / "missing.json"), "-o", str(runs / "merged.json")]) == 0
    assert "missing.json" in capsys.readouterr().out
    assert len(startup.load(runs / "merged.json").to_dict()["processes"]) == 9


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"traceEvents": []}', '{"schema": "weightstream.startup"}', "\x00"])
def test_foreign_files_are_errors(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "foreign.json"
    path.write_text(text)
    with pytest.raises(TimingError, match="foreign.json"):
        startup.load(path)
    for words in (["show"], ["export"], ["stats"]):
        assert main([*words, str(path)]) == 1
        assert "error: " in capsys.readouterr().err
    with pytest.raises(TimingError):
        startup.diff(path, path)


def test_wrong_settings_and_places_are_errors(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = runs / "a" / "0.json"
    with pytest.raises(TimingError, match="confidence"):
        startup.stats([file], confidence=2.0)
    with pytest.raises(TimingError, match="threshold"):
        startup.diff([file], [file], threshold=-1.0)
    (runs / "empty").mkdir()
    assert main(["stats", str(runs / "empty")]) == 1
    assert main(["show", str(runs / "a")]) == 1
    assert main(["export", str(file), "-o", str(runs / "missing" / "x")]) == 1
    assert capsys.readouterr().err.count("error: ") == 3
    (runs / "newer.json").write_text('{"schema": "weightstream.startup", "schema_version": 99}')
    with pytest.raises(TimingError, match="schema version 99; this version reads 1"):
        startup.load(runs / "newer.json")


def test_the_module_runs_without_torch(runs: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "weightstream.startup", "show", str(runs / "a" / "0.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "pipeline.create" in done.stdout and "weightstream.startup" in done.stderr
    assert not [line for line in done.stderr.splitlines() if line.rpartition("|")[2].strip() == "torch"]
