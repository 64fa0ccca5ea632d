"""Startup timings in odd programs: names that are no text, collectors that end in any order, interrupts, full disks, devices
as files. The measured program goes on, and its own exceptions are what it sees."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from startup_reports import by_name

from weightstream import offload, startup
from weightstream.errors import TimingError

UNDECODABLE = "\udcff"
"""What a byte 0xff in the name of a file is in Python's text."""


def test_names_that_utf8_cannot_hold_are_recorded_with_question_marks() -> None:
    class Odd(Exception):
        pass

    Odd.__qualname__ = UNDECODABLE
    with pytest.raises(Odd), startup.collect_startup_timings(name=f"worker {UNDECODABLE}") as timings:
        timings.add_facts(weights=f"{UNDECODABLE}.bin")
        thread = threading.Thread(
            target=startup.current().run, args=(lambda: _record("in a thread"),), name=f"thread {UNDECODABLE}"
        )
        thread.start()
        thread.join()
        with startup.phase(f"load {UNDECODABLE}") as phase:
            phase.count(f"bytes of {UNDECODABLE}", 1)
            raise Odd
    report = timings.to_dict()
    assert [one["name"] for one in report["phases"]] == ["in a thread", "load ?"]
    assert report["phases"][1]["error_type"] == "?"
    assert report["phases"][1]["counters"]["bytes of ?"] == 1
    assert report["processes"][0]["name"] == "worker ?"
    assert report["environment"]["weights"] == "?.bin"


def _record(name: str) -> None:
    with startup.phase(name):
        pass


def test_a_file_whose_name_is_no_text_loads_while_timings_are_collected(tmp_path: Path) -> None:
    path = os.path.join(tmp_path, f"{UNDECODABLE}.safetensors")
    offload.save_model(torch.nn.Linear(2, 2), path)
    with startup.collect_startup_timings() as timings:
        weights, _, _ = offload.load_sd(path)
    assert set(weights) == {"weight", "bias"}
    assert timings.to_dict()["environment"]["checkpoints"][0]["file"] == "?.safetensors"


def test_collectors_may_end_in_any_order() -> None:
    outer, inner = startup.collect_startup_timings(), startup.collect_startup_timings()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    _record("inner still collects")
    inner.__exit__(None, None, None)
    assert not startup.current(), "a collector that has ended is not current"
    _record("nobody collects")
    assert [one["name"] for one in inner.to_dict()["phases"]] == ["inner still collects"]
    assert outer.to_dict()["phases"] == []


def test_an_interrupt_while_the_device_is_waited_for_ends_the_phase_with_it() -> None:
    calls = []

    def synchronize() -> None:
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), startup.collect_startup_timings(synchronize) as timings:
        _record("first")
    phase = by_name(timings.to_dict())["first"]
    assert (phase["status"], phase["error_type"]) == ("error", "KeyboardInterrupt")


def test_counters_are_whole_numbers_of_any_library_and_do_not_overflow() -> None:
    numpy = pytest.importorskip("numpy")
    with startup.collect_startup_timings() as timings:
        with startup.phase("read") as phase:
            phase.count("bytes", numpy.int64(3))
            phase.count("bytes", torch.tensor(4))
            for wrong in (1.5, True, None, 1 << 63):
                with pytest.raises(TimingError):
                    phase.count("bytes", wrong)  # type: ignore[arg-type]
            with pytest.raises(TimingError):
                phase.count("bytes", (1 << 63) - 1)
    assert by_name(timings.to_dict())["read"]["counters"]["bytes"] == 7


def test_devices_and_pipes_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    with startup.collect_startup_timings() as timings:
        _record("first")
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    found = []
    reader = threading.Thread(target=lambda: found.append(fifo.read_text()), daemon=True)
    reader.start()
    timings.save(fifo, format="folded")
    reader.join(timeout=60)
    assert found and found[0].startswith("first ")
    assert stat.S_ISFIFO(os.stat(fifo).st_mode)


def test_paths_may_be_bytes_and_impossible_ones_are_refused(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path / "start.json")
    with startup.collect_startup_timings(path=os.fsencode(tmp_path / "start.jsonl")) as timings:
        _record("first")
    timings.save(path)
    assert startup.load(path).to_dict()["complete"]
    assert startup.load(os.fsencode(tmp_path / "start.jsonl")).to_dict()["complete"]
    assert str(startup.merge(path))
    with pytest.raises(TimingError, match="null byte"):
        timings.save("a\0b")


def _command(report: Path, shell: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'"$PYTHON" -m weightstream.startup show "$REPORT" {shell}'],
        env={**os.environ, "PYTHON": sys.executable, "REPORT": str(report), **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(("shell", "says"), [(">&-", "output is closed"), (">/dev/full", "No space left on device")])
def test_output_that_cannot_be_written_is_an_error_in_one_line(tmp_path: Path, shell: str, says: str) -> None:
    with startup.collect_startup_timings() as timings:
        _record("first")
    timings.save(tmp_path / "start.json")
    ran = _command(tmp_path / "start.json", shell)
    assert ran.returncode == 1
    assert says in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_a_terminal_of_another_encoding_gets_question_marks(tmp_path: Path) -> None:
    with startup.collect_startup_timings() as timings:
        _record("größer")
    timings.save(tmp_path / "start.json")
    ran = _command(tmp_path / "start.json", "", PYTHONIOENCODING="ascii")
    assert ran.returncode == 0, ran.stderr
    assert "gr??er" in ran.stdout


def test_the_longest_report_can_be_read_again(tmp_path: Path) -> None:
    name = "x" * 250
    with startup.collect_startup_timings(counters=False, environment=False) as timings:
        for _ in range(100_001):
            _record(name)
    timings.save(tmp_path / "start.json")
    report = startup.load(tmp_path / "start.json").to_dict()
    assert (len(report["phases"]), report["dropped"]) == (100_000, 1)


def test_a_deleted_current_folder_is_an_error_of_writing_only(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    code = (
        "import os; from weightstream import startup\n"
        "os.rmdir(os.getcwd())\n"
        "with startup.collect_startup_timings() as timings: pass\n"
        "try: timings.save('start.json')\n"
        "except startup.TimingError as error: print(error)\n"
        f"timings.save({str(tmp_path / 'start.json')!r})\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("cannot write start.json: ")
    assert (tmp_path / "start.json").exists()


def test_a_package_whose_version_cannot_be_read_stops_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("importlib.metadata.version", version)
    with startup.collect_startup_timings() as timings:
        _record("first")
    assert timings.to_dict()["environment"]["packages"] == {}


def test_a_file_that_cannot_be_described_is_named_without_its_folder(tmp_path: Path) -> None:
    with startup.collect_startup_timings() as timings:
        startup.describe_checkpoint(os.fsencode(tmp_path / "missing.safetensors"))
    (file,) = timings.to_dict()["environment"]["checkpoints"]
    assert file["file"] == "missing.safetensors" and "missing.safetensors" in file["problem"]
    assert str(tmp_path) not in str(file)


def test_a_parent_that_is_no_handle_is_refused() -> None:
    with startup.collect_startup_timings(), startup.phase("first") as first:
        with pytest.raises(TimingError, match=r"what current\(\) gives, not a phase"):
            startup.phase("second", parent=first)  # type: ignore[arg-type]
