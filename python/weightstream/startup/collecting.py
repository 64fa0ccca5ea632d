"""The collector: what records the phases of a context, and what it gives in the end."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Optional, Union

from .._native import StartupRecorder
from ..errors import TimingError
from .environment import after_start, before_start, checkpoint_facts
from .memory import Levels, device_memory, joined
from .phases import Node, outside, top, utf8
from .reports import Report

__all__ = ["StartupTimings", "collect_startup_timings", "describe_checkpoint", "synchronize_cuda"]

Path = Union[str, "os.PathLike[str]"]


def collect_startup_timings(
    synchronize: Optional[Callable[[], object]] = None,
    *,
    path: Optional[Path] = None,
    rank: Optional[int] = None,
    name: str = "",
    counters: bool = True,
    environment: bool = True,
) -> StartupTimings:
    """Collects the phases of this context, in this process, until the end of the block.

    synchronize: called at the beginning and the end of each phase, so that durations hold what a device computes and not
        only its submission; `synchronize_cuda` is one. It is always called, and its own time is reported apart. What it
        raises is a TimingError, unless the phase raises something itself: that goes on, and the report notes the other.
    path: write each event to this file as it happens; a killed process leaves what it did, and `load` and `merge` read it.
    rank: of this process among workers, for `merge`; the launcher's RANK if there is one.
    counters: bytes read, page faults and memory of each phase, in this process and on the device: some 40 µs a phase.
    environment: versions, GPU, driver, kernel, and the files that are loaded. No environment variables, no arguments.

    A collector in another one collects alone until its end: the outer one has nothing of what happens meanwhile. Worker
    processes collect for themselves; forked children record nothing and warn once.
    """
    return StartupTimings(synchronize, path, rank, name, counters, environment)


class StartupTimings:
    """What is collected: a context manager, and afterwards the report."""

    def __init__(
        self,
        synchronize: Optional[Callable[[], object]],
        path: Optional[Path],
        rank: Optional[int],
        name: str,
        counters: bool,
        environment: bool,
    ) -> None:
        """Made by `collect_startup_timings`."""
        if synchronize is not None and not callable(synchronize):
            raise TimingError(f"synchronize is called without arguments; {synchronize!r} cannot be called")
        self._synchronize = synchronize
        self._path = None if path is None else os.fsdecode(path)
        self._rank = _rank(rank)
        self._label = utf8(str(name))
        self._counters = bool(counters)
        self._environment = bool(environment)
        self._recorder: Optional[StartupRecorder] = None
        self._report: Optional[Report] = None
        self._node: Optional[Node] = None
        self._process = os.getpid()
        self._warned = False
        self._synchronizing: set[int] = set()
        """Threads that are in the callback: phases there are not measured by it."""
        self._described: dict[str, dict[str, Any]] = {}
        """Files, as they were before they were loaded."""

    def __enter__(self) -> StartupTimings:
        if self._recorder is not None:
            raise TimingError("this collector was used already; make a new one each time")
        facts = before_start() if self._environment else {}
        self._process = os.getpid()
        self._recorder = StartupRecorder(self._path, self._counters, self._rank, self._label)
        self._add(facts)
        self._node = Node(self, None, top.get(), None, False, None)
        top.set(self._node)
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        node, recorder = self._node, self._recorder
        if node is None or recorder is None:
            raise TimingError("this collector is not open")
        self._node = None
        at = recorder.now()
        # Collectors may end in another order than that of nesting, and in another context than they began in.
        node.ended = True
        top.set(outside(top.get(), self))
        if at is None:  # a forked child
            return
        if self._environment:
            try:
                self._add(after_start())
            except Exception as failure:  # facts are no reason to fail a start that went well
                recorder.note(f"the environment is not known: {type(failure).__name__}")
        native = recorder.finish(at)
        self._report = None if native is None else Report(native)

    @property
    def report(self) -> Report:
        """The report: so far inside the block, where open phases are marked so, and the whole one after it."""
        if self._report is not None:
            return self._report
        native = self._recorder.report() if self._recorder is not None else None
        if native is None:
            raise TimingError("nothing was collected here: the collector was not entered in this process")
        return Report(native)

    def to_dict(self) -> dict[str, Any]:
        """The report as a dictionary that JSON can hold; all times in seconds.

        `phases`, in the order of beginning: `id`, `parent_id`, `name`, `start_offset`, `duration` with what it contains,
        `exclusive` without, `status` ("success", "error", "open") and `error_type`, `counters`, `levels`. Of the whole:
        `duration`, `unattributed` (in no phase), `overlap`, `synchronization`, `complete`, `environment`, `schema_version`.
        """
        return self.report.to_dict()

    def save(self, path: Path, format: str = "json") -> None:
        """Writes the report to a file: "json", "chrome" (Perfetto), "folded" (flame graphs) or "table"."""
        self.report.save(path, format)

    def add_facts(self, **facts: Any) -> None:
        """Adds facts to the report's environment; they have to be what JSON can hold."""
        if self._recorder is None or self._node is None:
            raise TimingError("facts are added while the collector is open")
        self._add(facts)

    def _add(self, facts: dict[str, Any]) -> None:
        if facts and self._recorder is not None:
            try:
                self._recorder.environment(utf8(json.dumps(facts, allow_nan=False, ensure_ascii=False)))
            except (TypeError, ValueError) as error:
                raise TimingError(f"facts are what JSON can hold: {error}") from None

    def _here(self) -> bool:
        """Whether this records: it is open, and in the process that opened it."""
        if self._node is None:
            return False
        if self._process == os.getpid():
            return True
        if not self._warned:
            self._warned = True
            warnings.warn(
                "startup timings are collected by the process that forked this one; collect here to record its phases",
                RuntimeWarning,
                stacklevel=5,
            )
        return False

    def _begin(self, name: str, parent: Node) -> Optional[tuple[int, Levels]]:
        """Begins a phase; None if it is not recorded."""
        if not self._here() or self._recorder is None:
            return None
        waited, failure = self._wait()
        if failure is not None:
            if not isinstance(failure, Exception):
                raise failure
            raise TimingError(f"the synchronization callback failed before {name!r}: {_told(failure)}") from failure
        levels = device_memory() if self._counters else None
        number = self._recorder.begin(utf8(name), parent.id, utf8(threading.current_thread().name), waited)
        return None if number is None else (number, levels)

    def _end(
        self,
        node: Node,
        kind: Optional[type[BaseException]],
        counters: Optional[dict[str, Optional[int]]],
        levels: Optional[dict[str, tuple[Optional[int], Optional[int]]]],
    ) -> None:
        """Ends a phase. Where its body raised, nothing here does."""
        recorder = self._recorder
        # A phase that outlives the recording, or its process, ends unseen.
        if recorder is None or node.id is None or self._node is None or self._process != os.getpid():
            return
        waited, failure = self._wait()
        ended = kind if kind is not None else type(failure) if failure is not None else None
        error = None if ended is None else utf8(ended.__qualname__)
        if self._counters:
            after = joined(node.levels, device_memory())
            levels = {**after, **levels} if levels else after
        try:
            recorder.end(node.id, error, waited, counters, levels)
        except TimingError:
            if kind is None:
                raise
        if failure is None:
            return
        if not isinstance(failure, Exception):
            raise failure  # Ctrl-C while the device is waited for
        if kind is None:
            raise TimingError(f"the synchronization callback failed: {_told(failure)}") from failure
        recorder.note(utf8(f"the synchronization callback failed where a phase did, too: {_told(failure)}"))

    def _wait(self) -> tuple[int, Optional[BaseException]]:
        """Calls the synchronization callback: nanoseconds, and what it raised."""
        if self._synchronize is None:
            return 0, None
        thread = threading.get_ident()
        if thread in self._synchronizing:
            return 0, None
        self._synchronizing.add(thread)
        begun = time.perf_counter_ns()
        failure: Optional[BaseException] = None
        try:
            self._synchronize()
        except BaseException as error:
            failure = error  # its phase ends first, with it as the reason
        finally:
            self._synchronizing.discard(thread)
        return time.perf_counter_ns() - begun, failure


def synchronize_cuda() -> None:
    """Waits for what the current CUDA device was given; does nothing until CUDA is initialized, so that the first call
    does not move making its context into another phase."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def describe_checkpoint(paths: Union[Path, Iterable[Path]]) -> None:
    """Adds to the report what is known of these files before they are loaded: size, file system, header's hash, and the
    part of them that lies in the page cache. Nothing without a collector. Loading of this package does it by itself."""
    node = top.get()
    if node is None:
        return
    collector = node.collector
    if not collector._environment or not collector._here() or collector._recorder is None:
        return
    several = [paths] if isinstance(paths, (str, bytes, os.PathLike)) else list(paths)
    before = len(collector._described)
    for path in map(os.fsdecode, several):
        if path not in collector._described:
            # Without its folder, which may be named after somebody.
            collector._described[path] = {"file": os.path.basename(path), **checkpoint_facts(path)}
    if len(collector._described) > before:
        collector._add({"checkpoints": list(collector._described.values())})


def _rank(rank: Any) -> Optional[int]:
    if rank is None:
        found = os.environ.get("RANK", "")
        return int(found) if found.isascii() and found.isdigit() and len(found) < 9 else None
    if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 1 << 32:
        return rank
    raise TimingError(f"rank is {rank!r}; give a number from 0 up, or None")


def _told(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"
