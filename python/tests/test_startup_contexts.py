"""Startup timings where the context of a phase is not that of the code: generators, threads, tasks, forked children."""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager

import pytest
from startup_reports import by_name, parents

from weightstream import startup


def step(name: str) -> None:
    """A phase of that name."""
    with startup.phase(name):
        pass


def test_a_phase_around_yields_does_not_leak_into_the_consumer() -> None:
    def produce() -> Iterator[int]:
        with startup.phase("producing"):
            for number in range(3):
                step(f"made {number}")
                yield number

    with startup.collect_startup_timings() as timings:
        with startup.phase("consuming"):
            for number in produce():
                step(f"used {number}")
        step("after")
    found = parents(timings.to_dict())
    assert found["producing"] == "consuming" and found["after"] is None
    for number in range(3):
        assert found[f"made {number}"] == "producing"
        assert found[f"used {number}"] == "consuming"
    assert {phase["status"] for phase in timings.to_dict()["phases"]} == {"success"}


def test_a_generator_resumed_in_another_phase_keeps_its_own() -> None:
    def produce() -> Iterator[None]:
        with startup.phase("producing"):
            step("first")
            yield
            step("second")
            yield

    with startup.collect_startup_timings() as timings:
        with startup.phase("outer"):
            values = produce()
            next(values)
            with startup.phase("consumer"):
                next(values)
                step("own")
            step("beside")
            values.close()
        step("after")
    report = timings.to_dict()
    assert parents(report) == {
        "outer": None,
        "producing": "outer",
        "first": "producing",
        "consumer": "outer",
        "second": "producing",
        "own": "consumer",
        "beside": "outer",
        "after": None,
    }
    assert by_name(report)["producing"]["error_type"] == "GeneratorExit"


def test_a_generator_closed_in_another_context_or_thread_raises_nothing() -> None:
    def produce() -> Iterator[int]:
        with startup.phase("producing"):
            yield 1
            yield 2

    with startup.collect_startup_timings() as timings:
        first, second, third = produce(), produce(), produce()
        for values in (first, second, third):
            assert next(values) == 1
        contextvars.copy_context().run(first.close)
        thread = threading.Thread(target=lambda: list(second))
        thread.start()
        thread.join()
        step("beside")
        list(third)
        step("after")
    report = timings.to_dict()
    found = [(phase["name"], phase["parent_id"], phase["error_type"]) for phase in report["phases"]]
    assert found == [
        ("producing", None, "GeneratorExit"),
        ("producing", None, None),
        ("producing", None, None),
        ("beside", None, None),
        ("after", None, None),
    ]


def test_a_generator_that_outlives_the_phase_it_began_in_moves_up() -> None:
    def produce() -> Iterator[int]:
        with startup.phase("producing"):
            yield 1

    with startup.collect_startup_timings() as timings:
        with startup.phase("outer"):
            with startup.phase("inner"):
                values = produce()
                next(values)
            list(values)
    report = timings.to_dict()
    assert parents(report)["producing"] == "outer"
    assert by_name(report)["producing"]["outlived"] == by_name(report)["inner"]["id"]


def test_a_context_manager_made_of_a_generator_contains_its_block() -> None:
    @contextmanager
    def loading(name: str) -> Iterator[None]:
        with startup.phase(name):
            yield

    def produce() -> Iterator[int]:
        with startup.phase("producing"):
            yield 1

    with startup.collect_startup_timings() as timings:
        with loading("outer"), loading("inner"):
            step("within")
            for _ in produce():
                step("consumed")
                with loading("beside"):
                    step("deeper")
        with ExitStack() as stack:
            stack.enter_context(startup.phase("stacked"))
            stack.enter_context(loading("entered"))
            step("last")
    assert parents(timings.to_dict()) == {
        "outer": None,
        "inner": "outer",
        "within": "inner",
        "producing": "inner",
        "consumed": "inner",
        "beside": "inner",
        "deeper": "beside",
        "stacked": None,
        "entered": "stacked",
        "last": "entered",
    }


def test_decorated_generators_and_coroutines() -> None:
    @startup.phase("generator")
    def produce() -> Iterator[int]:
        step("inside")
        received = yield 1
        assert received == "sent"
        return 5  # noqa: B901

    @startup.phase("coroutine")
    async def work() -> int:
        step("awaited")
        await asyncio.sleep(0)
        return 6

    @startup.phase("stream")
    async def stream() -> AsyncIterator[int]:
        step("streamed")
        yield 7

    async def main() -> None:
        assert await work() == 6
        async for _ in stream():
            step("used")

    with startup.collect_startup_timings() as timings:
        values = produce()
        assert next(values) == 1
        with pytest.raises(StopIteration) as ended:
            values.send("sent")
        assert ended.value.value == 5
        asyncio.run(main())
    assert parents(timings.to_dict()) == {
        "generator": None,
        "inside": "generator",
        "coroutine": None,
        "awaited": "coroutine",
        "stream": None,
        "streamed": "stream",
        "used": None,
    }


def test_tasks_have_the_phase_they_were_made_in() -> None:
    @asynccontextmanager
    async def loading(name: str) -> AsyncIterator[None]:
        with startup.phase(name):
            yield

    async def load(name: str) -> None:
        async with loading(name):
            await asyncio.sleep(0)
            step(f"{name} read")
            await asyncio.to_thread(step, f"{name} in a thread")

    async def main() -> None:
        with startup.phase("all"):
            await asyncio.gather(load("vae"), load("transformer"))

    with startup.collect_startup_timings() as timings:
        asyncio.run(main())
    found = parents(timings.to_dict())
    for name in ("vae", "transformer"):
        assert found[name] == "all"
        assert found[f"{name} read"] == name and found[f"{name} in a thread"] == name


def test_threads_record_with_a_handle_and_not_without() -> None:
    with startup.collect_startup_timings() as timings, ThreadPoolExecutor(2) as pool:
        with startup.phase("load"):
            handle = startup.current()
            assert handle

            def with_handle() -> None:
                with startup.phase("by handle", parent=handle):
                    step("below")

            pool.submit(with_handle).result()
            pool.submit(handle.run, step, "by run").result()
            pool.submit(step, "without").result()
            pool.submit(contextvars.copy_context().run, step, "by context").result()
        # The phase has ended: what begins in it lies in what contains it.
        pool.submit(handle.run, step, "late").result()
    report = timings.to_dict()
    assert parents(report) == {
        "load": None,
        "by handle": "load",
        "below": "by handle",
        "by run": "load",
        "by context": "load",
        "late": None,
    }
    assert by_name(report)["by handle"]["thread"] != by_name(report)["load"]["thread"]
    assert not startup.current() and startup.current().run(len, "abc") == 3


def test_a_handle_taken_in_a_generators_phase_counts_on_another_thread() -> None:
    def produce() -> Iterator[startup.Handle]:
        with startup.phase("producing"):
            yield startup.current()

    with startup.collect_startup_timings() as timings:
        for handle in produce():
            thread = threading.Thread(target=handle.run, args=(step, "elsewhere"))
            thread.start()
            thread.join()
    assert parents(timings.to_dict())["elsewhere"] == "producing"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_records_nothing_and_warns_once(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "a.jsonl")
    with startup.collect_startup_timings(path=path) as timings:
        with startup.phase("before"):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    with warnings.catch_warnings(record=True) as caught:
                        warnings.simplefilter("always")
                        step("in the child")
                        step("again")
                    messages = [str(one.message) for one in caught]
                    # A collector of its own works there.
                    with startup.collect_startup_timings(environment=False) as own:
                        step("its own")
                    good = len(messages) == 1 and "forked" in messages[0]
                    status = 0 if good and parents(own.to_dict()) == {"its own": None} else 2
                finally:
                    sys.stdout.flush()
                    os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert parents(timings.to_dict()) == {"before": None}
    assert startup.load(path).to_dict()["phases"] == timings.to_dict()["phases"]
