"""Reports: from files or a collector, alone, merged or compared, and as other programs want them."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterable
from typing import Any, Optional, Union

from .._native import StartupReport, startup_diff, startup_stats
from ..errors import TimingError

__all__ = ["Comparison", "FORMATS", "Report", "diff", "load", "merge", "stats"]

Path = Union[str, "os.PathLike[str]"]

FORMATS = ("json", "chrome", "folded", "table")
_MOST_INDENTED = 8 << 20
"""Characters of JSON that are laid out for people. Spaces would make a long report larger than what is read."""


class Report:
    """Where the time of a start went. Prints as a table."""

    def __init__(self, native: StartupReport) -> None:
        """Made by `load`, `merge` and collectors."""
        self._native = native

    def to_dict(self) -> dict[str, Any]:
        """As a dictionary that JSON can hold; `StartupTimings.to_dict` says what is in it."""
        return json.loads(self._native.to_json())

    def render(self, format: str = "json") -> str:
        """As text: "json", "chrome" (opens in Perfetto), "folded" (flame graph programs read it) or "table"."""
        if format == "json":
            text = self._native.to_json()
            return (text if len(text) > _MOST_INDENTED else json.dumps(json.loads(text), indent=1)) + "\n"
        if format == "chrome":
            return self._native.chrome_trace() + "\n"
        if format == "folded":
            return self._native.folded_stacks()
        if format == "table":
            return self._native.table()
        raise TimingError(f"there is no format {format!r}; there are {', '.join(FORMATS)}")

    def save(self, path: Path, format: str = "json") -> None:
        """Writes it to a file, whole or not at all."""
        write_text(path, self.render(format))

    def __str__(self) -> str:
        return self._native.table()


class Comparison:
    """What several runs say. Prints as a table."""

    def __init__(self, json_text: str, table: str) -> None:
        """Made by `stats` and `diff`."""
        self._json = json_text
        self._table = table

    def to_dict(self) -> dict[str, Any]:
        """As a dictionary that JSON can hold."""
        return json.loads(self._json)

    def __str__(self) -> str:
        return self._table


def load(path: Path) -> Report:
    """Reads a report, or the file of a recording that may not have ended."""
    return Report(StartupReport.read(os.fsdecode(path)))


def merge(paths: Iterable[Path], output: Optional[Path] = None) -> Report:
    """The files of several processes as one report on one clock, each process a phase labelled by its rank.

    Files that are missing, cut or no reports are listed under `processes` with their state and problem; TimingError only if
    none can be read. `output` is a file to write it to, too.
    """
    report = Report(StartupReport.merge([os.fsdecode(path) for path in _listed(paths)]))
    if output is not None:
        report.save(output)
    return report


def stats(paths: Iterable[Path], confidence: float = 0.95) -> Comparison:
    """Median, 90th percentile and an interval of the mean for each phase, over runs of the same start.

    Runs that failed or did not end are left out and counted.
    """
    return Comparison(*startup_stats([os.fsdecode(path) for path in _listed(paths)], confidence))


def diff(
    before: Iterable[Path], after: Iterable[Path], confidence: float = 0.99, threshold: float = 0.05
) -> Comparison:
    """What each phase alone takes in two sets of runs, and which differences are beyond noise.

    confidence: that no difference is flagged falsely, over all phases. threshold: the smallest change that is flagged, as a
    part. Of single runs nothing is flagged.
    """
    files = [[os.fsdecode(path) for path in _listed(paths)] for paths in (before, after)]
    return Comparison(*startup_diff(*files, confidence, threshold))


def _listed(paths: Any) -> list[Any]:
    return [paths] if isinstance(paths, (str, bytes, os.PathLike)) else list(paths)


def write_text(path: Path, text: str) -> None:
    """Writes a file by way of another one beside it, so that nobody sees half of it. Devices and pipes are written to."""
    path = os.fsdecode(path)
    made = None
    try:
        path = os.path.abspath(path)  # fails where the current folder was deleted
        if _is_special(path):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            return
        handle, made = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".startup-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(handle, 0o666 & ~_umask())
            file.write(text)
        os.replace(made, path)
    except (OSError, ValueError) as error:
        if made is not None and os.path.exists(made):
            os.unlink(made)
        reason = getattr(error, "strerror", None) or error
        raise TimingError(f"cannot write {path}: {reason}") from error


def _is_special(path: str) -> bool:
    """Whether a path is something that a file must not take the place of, such as /dev/stdout."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _umask() -> int:
    """This process's mask for new files; reading it means setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
