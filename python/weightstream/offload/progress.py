"""Who watches a load: the callback of the context, or a bar on a terminal. Everybody else sees nothing.

The phases of one load, with their counts:

    Preparing Models                                                             0 of 1, when a context begins
    Reading Configuration, Building                                              of 2, fast_load_transformers_model only
    Reading Weights, Preparing Weights, Applying Weights, Weights Loaded         of 3
    Pinning                                                                      of GiB to lock, when a model is attached
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Optional

from ..errors import LoadingCancelled
from ..startup.phases import phase

__all__ = ["LoadingCallback", "Progress", "loading_context", "progress_in_context", "progress_of"]

_POLL_SECONDS = 0.02
"""How often at most `abort_requested` is asked in long work: well below the 200 ms in which a load must stop."""
_STAGES = {
    "Reading Configuration": "offload.configuration",
    "Building": "offload.build",
    "Reading Weights": "offload.read",
    "Preparing Weights": "offload.prepare",
    "Applying Weights": "offload.apply",
    "Weights Loaded": None,
}
"""What the phases of a load are called in startup timings."""
_BAR = 24
"""Characters of the terminal's bar."""


class LoadingCallback:
    """Hears of a load's progress, and may stop it.

    abort_requested: called often, in the loading thread; True stops the load with LoadingCancelled.
    progress: called as progress(phase, completed, total, model_id) at the start of each phase.

    What either of them raises stops the load too.
    """

    def __init__(
        self,
        abort_requested: Optional[Callable[[], bool]] = None,
        progress: Optional[Callable[[str, int, int, str], Any]] = None,
    ) -> None:
        """TypeError for what cannot be called: it would be found in the middle of a load."""
        for name, call in (("abort_requested", abort_requested), ("progress", progress)):
            if call is not None and not callable(call):
                raise TypeError(f"{name} is {call!r}, which cannot be called; give a function, or None")
        self.abort_requested = abort_requested
        self.progress = progress

    def check_abort(self) -> None:
        """Raises LoadingCancelled if an abort is requested."""
        if self.abort_requested is not None and self.abort_requested():
            raise LoadingCancelled("loading was cancelled")

    def report(self, phase: str, completed: int, total: int, model_id: str = "") -> None:
        """Passes a phase on; asks for an abort before and after."""
        self.check_abort()
        if self.progress is not None:
            self.progress(phase, completed, total, model_id)
            self.check_abort()


_context: ContextVar[tuple[Optional[LoadingCallback], dict[str, str]]] = ContextVar(
    "weightstream_loading", default=(None, {})
)


@contextmanager
def loading_context(
    callback: Optional[LoadingCallback], model_ids: Optional[Mapping[Any, str]] = None
) -> Iterator[Optional[LoadingCallback]]:
    """Loads in this context report to `callback`. `model_ids` gives the id reported for a file, by its path.

    The context is that of the thread or task, so loads elsewhere are not seen.
    """
    if callback is not None and not isinstance(callback, LoadingCallback):
        raise TypeError(f"loading_context takes a LoadingCallback or None, not a {type(callback).__name__}")
    if model_ids is not None and not isinstance(model_ids, Mapping):
        raise TypeError(f"model_ids is a {type(model_ids).__name__}; give a dictionary of ids by the paths of files")
    token = _context.set((callback, {_key(path): str(name) for path, name in (model_ids or {}).items()}))
    try:
        if callback is not None:
            callback.report("Preparing Models", 0, 1)
        yield callback
    finally:
        _context.reset(token)


def _key(path: Any) -> str:
    return os.path.abspath(os.fspath(path))


def progress_of(paths: list[str]) -> Progress:
    """The way to whoever watches in this context, for a load of these files."""
    callback, ids = _context.get()
    model_id = next((ids[key] for key in map(_key, paths) if key in ids), "")
    bar = None
    if callback is None and _on_terminal():
        bar = _Bar(os.path.basename(paths[0]) if paths else "weights")
    return Progress(callback, model_id, bar)


def _on_terminal() -> bool:
    try:
        return bool(sys.stderr.isatty())
    except (AttributeError, OSError, ValueError):  # none, one of an application's own, or closed: no reason to fail
        return False


def progress_in_context(paths: list[str]) -> Optional[Progress]:
    """The way to the callback of this context; None without one."""
    return progress_of(paths) if _context.get()[0] is not None else None


class Progress:
    """What the steps of one load tell."""

    def __init__(self, callback: Optional[LoadingCallback], model_id: str, bar: Optional[_Bar] = None) -> None:
        self._callback = callback
        self._model_id = model_id
        self._bar = bar
        self._asked = 0.0
        self._stage: Optional[phase] = None
        self._handled = sys.exc_info()[1]
        """What was being handled when the load began: it is not what ends a phase."""

    def phase(self, name: str, completed: int, total: int) -> None:
        """A phase begins."""
        if name in _STAGES:
            self._record(_STAGES[name])
        if self._callback is not None:
            self._callback.report(name, completed, total, self._model_id)
        if self._bar is not None:
            self._bar.show(name, completed / total, 1 / total)

    def alone(self, name: str) -> None:
        """Work that is no load begins, in one phase: shown on a terminal, and no callback hears of it."""
        if self._bar is not None:
            self._bar.show(name, 0.0, 1.0)

    def poll(self, within: float = 0.0) -> None:
        """Lets an abort through, in the middle of a phase. `within` is how much of it is done, from 0 to 1."""
        now = time.monotonic()
        if now - self._asked < _POLL_SECONDS:
            return
        if self._callback is not None:
            self._callback.check_abort()
            now = time.monotonic()
        self._asked = now
        if self._bar is not None:
            self._bar.within(within)

    def _record(self, name: Optional[str]) -> None:
        """Ends the phase of startup timings that is open, as the load goes, and begins the next."""
        stage, self._stage = self._stage, None
        if stage is not None:
            error = sys.exc_info()[1]
            failed = error if error is not self._handled else None
            stage.__exit__(None if failed is None else type(failed), failed, None)
        if name is not None:
            self._stage = phase(name)
            self._stage.__enter__()

    def close(self) -> None:
        """The load is over, one way or the other."""
        self._record(None)
        if self._bar is not None:
            self._bar.close()


class _Bar:
    """One line on a terminal."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._phase = ""
        self._start = 0.0
        self._share = 1.0
        self._begun = time.monotonic()
        self._width = 0

    def show(self, phase: str, start: float, share: float) -> None:
        self._phase, self._start, self._share = phase, start, share
        self._draw(start)

    def within(self, done: float) -> None:
        self._draw(min(self._start + max(done, 0.0) * self._share, 1.0))

    def _draw(self, fraction: float) -> None:
        full = round(fraction * _BAR)
        seconds = time.monotonic() - self._begun
        bar = "█" * full + " " * (_BAR - full)
        line = f"{self._name}: {fraction:4.0%}|{bar}| {self._phase} [{seconds:.1f}s]"
        self._write("\r" + line.ljust(self._width))
        self._width = len(line)

    def close(self) -> None:
        if self._width:
            self._write("\n")
            self._width = 0

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, UnicodeError, ValueError):  # a terminal that is gone or cannot show it is no reason to fail
            pass
