"""What the tests of startup timings ask of reports."""

from __future__ import annotations

from typing import Any


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The phases of a report by name; each name once."""
    found = {phase["name"]: phase for phase in report["phases"]}
    assert len(found) == len(report["phases"])
    return found


def parents(report: dict[str, Any]) -> dict[str, Any]:
    """For each phase the name of its parent."""
    names = {phase["id"]: phase["name"] for phase in report["phases"]}
    return {phase["name"]: names.get(phase["parent_id"]) for phase in report["phases"]}
