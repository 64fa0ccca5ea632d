"""Phases, and which one a phase lies in.

The current phase is a context variable: tasks and `asyncio.to_thread` have it, threads and executors do not and are given a
handle. It is a chain of nodes, each with the one above it; what has ended, or lies in a generator that is suspended, is passed
over. So a phase may be ended in another context than it was begun in, and one around a `yield` contains what the generator
does, not what its consumer does meanwhile.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable
from contextlib import aclosing
from contextvars import ContextVar
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Optional, TypeVar

from ..errors import TimingError

if TYPE_CHECKING:
    from .collecting import StartupTimings

__all__ = ["Handle", "Node", "current", "outside", "phase", "top", "utf8"]

_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Node:
    """A phase that is open, or a collector: then without a number."""

    __slots__ = ("above", "collector", "ended", "frame", "id", "isolated", "levels", "suspends")

    def __init__(
        self,
        collector: StartupTimings,
        number: Optional[int],
        above: Optional[Node],
        frame: Optional[FrameType],
        suspends: bool,
        levels: Any,
    ) -> None:
        self.collector = collector
        self.id = number
        self.above = above
        self.frame = frame
        """Where it was begun, while it is open."""
        self.suspends = suspends
        """Whether that is a generator, which may be suspended inside it."""
        self.isolated = suspends or (above is not None and above.isolated)
        """Whether any of the chain from here on does."""
        self.levels = levels
        self.ended = False


top: ContextVar[Optional[Node]] = ContextVar("weightstream_startup", default=None)


def _live(node: Optional[Node], caller: Optional[FrameType]) -> Optional[Node]:
    """The innermost node of the chain that is open and whose code is what calls now."""
    while node is not None and node.ended:
        node = node.above
    if node is None or not node.isolated:
        return node
    # With generators the order of beginning is not that of nesting: the innermost frame that calls now decides.
    by_frame: dict[FrameType, Node] = {}
    plain = None
    link: Optional[Node] = node
    while link is not None:
        if not link.ended:
            if link.frame is not None:
                by_frame.setdefault(link.frame, link)
            if plain is None and not link.suspends:
                plain = link
        link = link.above
    while caller is not None:
        found = by_frame.get(caller)
        if found is not None:
            return found
        caller = caller.f_back
    return plain


def _frame(frame: Optional[FrameType]) -> tuple[Optional[FrameType], bool]:
    """The frame that begins a phase, and whether it is a generator that its consumer does not lie in.

    A generator that contextlib made a context manager of is entered, not consumed: its phase is one of whoever enters it.
    """
    while frame is not None and frame.f_globals.get("__name__") == "contextlib":
        frame = frame.f_back
    if frame is None or not frame.f_code.co_flags & _GENERATOR:
        return frame, False
    driver = frame.f_back
    managed = driver is not None and driver.f_globals.get("__name__") == "contextlib"
    return _frame(driver) if managed else (frame, True)


def outside(node: Optional[Node], collector: StartupTimings) -> Optional[Node]:
    """What is current where a collector's block ends: the innermost of the chain that is neither its own nor over."""
    while node is not None and (node.ended or node.collector is collector):
        node = node.above
    return node


class Handle:
    """A phase that work elsewhere can lie in: given to a thread, `phase(name, parent=handle)` begins there in it."""

    __slots__ = ("_node",)

    def __init__(self, node: Optional[Node]) -> None:
        """Made by `current`."""
        self._node = node

    def __bool__(self) -> bool:
        """Whether anything is collected."""
        return self._node is not None

    def run(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `work` with this as its current phase, on any thread: `executor.submit(handle.run, work, …)`."""
        node = self._node
        # One of its own: whether the phase's generator is suspended means nothing on another thread.
        base = node and Node(node.collector, node.id, None, None, False, None)
        token = top.set(base)
        try:
            return work(*args, **kwargs)
        finally:
            top.reset(token)


def current() -> Handle:
    """The phase that code here lies in, for use on other threads. Without a collector it does nothing there either."""
    node = top.get()
    if node is None:
        return Handle(None)
    return Handle(_live(node, sys._getframe(1)))


class phase:
    """A phase of a start: a context manager, and a decorator of functions, coroutines and generators.

    with phase("text_encoder.load"): …            in the current phase
    with phase("read", parent=handle): …          in the one that `current()` gave elsewhere

    What raises inside goes on unchanged, and the phase has the status "error" with its type, also for `KeyboardInterrupt`,
    cancellation and a generator that is closed early. Without a collector nothing happens. `count` and `level` add to it.
    """

    __slots__ = ("_counters", "_levels", "_name", "_node", "_parent")

    def __init__(self, name: str, *, parent: Optional[Handle] = None) -> None:
        if type(name) is not str:
            name = _text(name)
        if parent is not None and not isinstance(parent, Handle):
            raise TimingError(f"the parent of a phase is what current() gives, not a {type(parent).__name__}")
        self._name = name
        self._parent = parent
        self._node: Optional[Node] = None
        self._counters: Optional[dict[str, Optional[int]]] = None
        self._levels: Optional[dict[str, tuple[Optional[int], Optional[int]]]] = None

    def __enter__(self) -> phase:
        above = top.get()
        if above is None and self._parent is None:
            return self
        self._begin(above, sys._getframe(1))
        return self

    def _begin(self, above: Optional[Node], caller: FrameType) -> None:
        if self._node is not None:
            raise TimingError(f"the phase {self._name!r} is open already; make a new one each time")
        parent = self._parent._node if self._parent is not None else _live(above, caller)
        if parent is None:
            return
        collector = parent.collector
        begun = collector._begin(self._name, parent)
        if begun is None:
            return
        number, levels = begun
        frame, suspends = _frame(caller)
        self._node = Node(collector, number, above, frame, suspends, levels)
        top.set(self._node)

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        node = self._node
        if node is None:
            return
        self._node = None
        node.ended = True
        node.frame = None
        if top.get() is node:
            top.set(node.above)
        counters, self._counters = self._counters, None
        levels, self._levels = self._levels, None
        node.collector._end(node, kind, counters, levels)

    def count(self, name: str, amount: int) -> None:
        """Adds to an amount of this phase, such as bytes read. Does nothing where it is not recorded."""
        if self._node is not None:
            counters = self._counters = self._counters or {}
            name = _text(name)
            if amount is None:
                raise TimingError(f"an amount of {name} to add is a whole number, not None")
            # The sum is checked here: at the phase's end it would hide what the phase itself raises.
            counters[name] = _number((counters.get(name) or 0) + _number(amount))

    def level(self, name: str, before: Optional[int], after: Optional[int]) -> None:
        """Says what was there before and after, such as memory of a device; None is not known."""
        if self._node is not None:
            levels = self._levels = self._levels or {}
            levels[_text(name)] = (_number(before), _number(after))

    def __call__(self, function: _Function) -> _Function:
        """Makes each call of `function` such a phase; of a generator, from its first value to its end."""
        name, parent = self._name, self._parent
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapped(*args: Any, **kwargs: Any) -> Any:
                with phase(name, parent=parent):
                    return await function(*args, **kwargs)

        elif inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            async def wrapped(*args: Any, **kwargs: Any) -> Any:
                with phase(name, parent=parent):
                    async with aclosing(function(*args, **kwargs)) as values:
                        async for value in values:
                            yield value

        elif inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                with phase(name, parent=parent):
                    return (yield from function(*args, **kwargs))

        else:

            @functools.wraps(function)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                with phase(name, parent=parent):
                    return function(*args, **kwargs)

        return wrapped  # type: ignore[return-value]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TimingError(f"names of phases and counters are text, not {type(value).__name__}")
    return utf8(str(value))


def utf8(text: str) -> str:
    """The text, with a question mark for what UTF-8 cannot hold: names of files may be any bytes, and a report is UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _number(value: Any) -> Any:
    if value is None:
        return None
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # those of NumPy and PyTorch, too
    except TypeError:
        number = None
    if number is not None and -(1 << 63) <= number < 1 << 63:
        return number
    raise TimingError(f"counters are whole numbers of 64 bits, not {value!r}")
