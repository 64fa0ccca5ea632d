"""The bench of what collecting costs: what it measures, and when it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import startup as bench


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few phases, and a start that is given."""
    monkeypatch.setattr(bench, "PHASES", 20)


def given(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """A start of thirty phases that took so long."""
    report = {"phases": [{}] * 30, "duration": seconds, "environment": {}}
    monkeypatch.setattr(bench, "start", lambda folder, model: report)


def test_every_way_of_collecting_is_measured(quick: None, tmp_path: Path) -> None:
    found = bench.costs(tmp_path)
    assert set(found) == {
        "off",
        "times",
        "times and counters",
        "times, counters and a file",
        "a collector with its environment, once",
    }
    assert all(cost > 0 for cost in found.values())
    assert (tmp_path / "recording.jsonl").read_text().count("vae.construct") == 22


def test_a_share_above_the_limit_fails(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["startup.py", "--out", str(out), "--commit", "abc"])
    results: list[dict[str, Any]] = []
    for seconds, code in [(1e6, 0), (1e-6, 1)]:
        given(monkeypatch, seconds)
        assert bench.main() == code
        results.append(json.loads(out.read_text()))
    assert [result["within"] for result in results] == [True, False]
    assert results[0]["phases"] == 30 and results[0]["commit"] == "abc"
    assert "30 phases in a start of" in capsys.readouterr().out
