"""What phases say of bytes, faults and memory, against reads and allocations of known size; and of files before loading."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weightstream import startup
from weightstream.startup.collecting import StartupTimings

SIZE = 256 << 20
NEAR = SIZE // 50
"""Two parts in a hundred."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file of 256 MiB that is on the disk, too."""
    path = tmp_path_factory.mktemp("counters") / "data"
    block = os.urandom(1 << 20)
    with open(path, "wb") as file:
        for _ in range(SIZE >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    yield path
    path.unlink()


def resident(path: Path) -> float:
    """The part of a file that is cached; the test is skipped where that is not told."""
    from weightstream._native import resident_fraction

    fraction = resident_fraction(str(path))[1]
    if fraction is None:
        pytest.skip("this system does not tell what is cached")
    return fraction


def make_cold(path: Path) -> None:
    """Takes the file out of the page cache; the test is skipped where the system keeps it."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(path) > 0.02:
        pytest.skip("this file system keeps its files in memory")


def make_warm(path: Path) -> None:
    """Reads all of the file."""
    with open(path, "rb") as file:
        while file.read(1 << 20):
            pass
    if resident(path) < 0.98:
        pytest.skip("there is no room for the file in the page cache")


def recorded(timings: StartupTimings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Counters and levels of the only phase."""
    (phase,) = timings.to_dict()["phases"]
    return phase["counters"], phase["levels"]


def near(value: int, wanted: int) -> bool:
    """Within two parts in a hundred of the file's size."""
    return abs(value - wanted) <= NEAR


def by_pread(path: Path) -> None:
    """Reads through the page cache."""
    target = bytearray(1 << 20)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(target):
            pass


def by_direct(path: Path) -> None:
    """Reads around the page cache; skips where that is not possible."""
    target = mmap.mmap(-1, 1 << 20)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("this file system has no direct reads")
    try:
        while os.readv(handle, [target]):
            pass
    finally:
        os.close(handle)


def by_mapping(path: Path) -> mmap.mmap:
    """Touches each page of a mapping, which is given back still mapped."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    for place in range(0, SIZE, mmap.PAGESIZE):
        mapped[place]
    return mapped


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("way", [by_pread, by_direct, by_mapping])
def test_bytes_are_counted_by_the_way_they_are_read(data: Path, way: Any, warm: bool) -> None:
    (make_warm if warm else make_cold)(data)
    with startup.collect_startup_timings(environment=False) as timings, startup.phase("read"):
        kept = way(data)
    counters, levels = recorded(timings)
    if counters["io.read_bytes"] is None:
        pytest.skip("this system does not count bytes")
    del kept
    mapped, direct = way is by_mapping, way is by_direct
    assert near(counters["io.rchar"], 0 if mapped else SIZE)
    # Readahead may have begun to fill the cache before; what is cold comes from the device once.
    assert near(counters["io.read_bytes"], SIZE if direct or not warm else 0)
    file = levels["memory.file"]
    assert near(file[1] - file[0], SIZE if mapped else 0)
    if warm:
        assert counters["faults.major"] <= 16


def test_memory_of_the_process_and_of_mapped_files_are_told_apart(data: Path) -> None:
    with startup.collect_startup_timings(environment=False) as timings, startup.phase("allocate"):
        # Not of the heap, which may have as much that was used before.
        kept = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        torch.frombuffer(kept, dtype=torch.uint8).fill_(1)
    _, levels = recorded(timings)
    anonymous, file = levels["memory.anonymous"], levels["memory.file"]
    if anonymous[0] is None:
        pytest.skip("this system does not tell")
    assert near(anonymous[1] - anonymous[0], SIZE) and near(file[1] - file[0], 0)
    del kept
    with startup.collect_startup_timings(environment=False) as timings, startup.phase("map"):
        mapped = by_mapping(data)
    _, levels = recorded(timings)
    anonymous, file = levels["memory.anonymous"], levels["memory.file"]
    assert near(anonymous[1] - anonymous[0], 0) and near(file[1] - file[0], SIZE)
    del mapped


def test_the_cached_part_of_a_checkpoint_is_told_before_it_is_loaded(data: Path) -> None:
    for prepare, low, high in [(make_cold, 0.0, 0.02), (make_warm, 0.98, 1.0)]:
        prepare(data)
        with startup.collect_startup_timings() as timings:
            startup.describe_checkpoint(data)
            by_pread(data)
            startup.describe_checkpoint([data])  # as it was before
        (facts,) = timings.to_dict()["environment"]["checkpoints"]
        assert facts["file"] == "data"
        assert low <= facts["resident_fraction"] <= high
        assert facts["bytes"] == SIZE and facts["file_system"]
    startup.describe_checkpoint(data)  # without a collector: nothing


def test_without_counters_there_are_none() -> None:
    with startup.collect_startup_timings(counters=False) as timings, startup.phase("read") as phase:
        phase.count("own", 1)
    assert recorded(timings) == ({"own": 1}, {})
