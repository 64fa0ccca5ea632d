"""Startup timings: what a collector records, in one context."""

from __future__ import annotations

import gc
import json
import sys
import timeit
from typing import Any

import pytest
from startup_reports import by_name, parents

from weightstream import startup
from weightstream.errors import TimingError


def test_without_a_collector_a_phase_leaves_nothing_behind() -> None:
    @startup.phase("decorated")
    def decorated() -> int:
        return 5

    def use() -> None:
        with startup.phase("unused") as phase:
            phase.count("bytes", 1)
            phase.level("memory", None, 1)
        assert decorated() == 5

    assert not startup.current()
    for _ in range(100):
        use()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(10_000):
        use()
    gc.collect()
    assert sys.getallocatedblocks() - before < 100
    with startup.collect_startup_timings(environment=False) as timings:
        pass
    assert timings.to_dict()["phases"] == []


def test_without_a_collector_a_phase_costs_less_than_a_microsecond() -> None:
    # The best of many short runs: a busy machine cannot make all of them slow. Twenty times the bound, for slow machines.
    def phases() -> None:
        for _ in range(1_000):
            with startup.phase("unused"):
                pass

    best = min(timeit.repeat(phases, number=1, repeat=30)) / 1_000
    assert best < 20e-6


def test_the_report_has_the_schema_and_goes_through_json() -> None:
    with startup.collect_startup_timings() as timings:
        with startup.phase("pipeline.create"):
            with startup.phase("component.vae") as vae:
                vae.count("tensors", 3)
                vae.count("tensors", 4)
                vae.level("device", None, 7)
        with startup.phase("first_request"):
            pass
    report = timings.to_dict()
    assert json.loads(json.dumps(report)) == report
    assert report["schema"] == "weightstream.startup" and report["schema_version"] == 1
    assert report["complete"] is True and report["duration"] > 0
    ids = [phase["id"] for phase in report["phases"]]
    assert len(set(ids)) == len(ids)
    for place, phase in enumerate(report["phases"]):
        assert {"id", "parent_id", "name", "start_offset", "duration", "status"} <= set(phase)
        assert phase["status"] == "success" and phase["error_type"] is None
        assert phase["parent_id"] is None or phase["parent_id"] in ids[:place]
    assert parents(report) == {"pipeline.create": None, "component.vae": "pipeline.create", "first_request": None}
    vae = by_name(report)["component.vae"]
    assert vae["counters"]["tensors"] == 7 and vae["levels"]["device"] == [None, 7]
    assert {"io.rchar", "io.read_bytes", "faults.minor", "faults.major"} <= set(vae["counters"])
    assert {"memory.anonymous", "memory.file", "memory.peak"} <= set(vae["levels"])


def test_children_lie_inside_their_parents_and_times_add_up() -> None:
    with startup.collect_startup_timings() as timings:
        for outer in range(5):
            with startup.phase(f"outer {outer}"):
                for inner in range(5):
                    with startup.phase(f"inner {outer}.{inner}"):
                        sum(range(1_000))
                sum(range(1_000))
    report = timings.to_dict()
    found = {phase["id"]: phase for phase in report["phases"]}
    for phase in report["phases"]:
        end = phase["start_offset"] + phase["duration"]
        assert end <= report["duration"] + 1e-9
        if phase["parent_id"] is not None:
            parent = found[phase["parent_id"]]
            assert parent["start_offset"] <= phase["start_offset"] + 1e-9
            assert end <= parent["start_offset"] + parent["duration"] + 1e-9
    exclusive = sum(phase["exclusive"] for phase in report["phases"])
    assert abs(exclusive + report["unattributed"] - report["overlap"] - report["duration"]) < 1e-6
    assert report["overlap"] == 0


class Odd(ValueError):
    """An error with a name of its own."""


@pytest.mark.parametrize("error", [Odd("x"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_an_error_goes_on_unchanged_and_is_recorded(error: BaseException) -> None:
    with startup.collect_startup_timings() as timings:
        with startup.phase("parent"):
            with startup.phase("before"):
                pass
            with pytest.raises(type(error)) as caught:
                with startup.phase("failing"):
                    raise error
            assert caught.value is error
            assert by_name(timings.to_dict())["parent"]["status"] == "open"
            with startup.phase("after"):
                pass
    found = by_name(timings.to_dict())
    assert (found["failing"]["status"], found["failing"]["error_type"]) == ("error", type(error).__qualname__)
    assert {found[name]["status"] for name in ("parent", "before", "after")} == {"success"}
    assert parents(timings.to_dict())["after"] == "parent"


def test_an_error_through_the_collector_ends_the_recording_and_restores_the_context() -> None:
    error = Odd("x")
    with startup.collect_startup_timings() as outer:
        with startup.phase("outer"):
            with pytest.raises(Odd) as caught:
                with startup.collect_startup_timings() as inner:
                    with startup.phase("inner"):
                        raise error
            assert caught.value is error
            with startup.phase("again"):
                pass
    assert not startup.current()
    assert parents(outer.to_dict()) == {"outer": None, "again": "outer"}
    report = inner.to_dict()
    assert report["complete"] and parents(report) == {"inner": None}
    assert report["phases"][0]["status"] == "error"


def test_an_inner_collector_records_alone() -> None:
    with startup.collect_startup_timings() as outer:
        with startup.phase("a"):
            with startup.collect_startup_timings() as inner, startup.phase("b"):
                pass
            with startup.phase("c"):
                pass
    assert parents(inner.to_dict()) == {"b": None}
    assert parents(outer.to_dict()) == {"a": None, "c": "a"}


def test_a_report_taken_inside_a_phase_marks_it_open() -> None:
    with startup.collect_startup_timings() as timings:
        with startup.phase("done"):
            pass
        with startup.phase("under way"):
            report = timings.to_dict()
            assert json.loads(json.dumps(report)) == report
            assert "(open)" in str(timings.report)
    assert not report["complete"]
    assert by_name(report)["under way"]["status"] == "open"
    assert by_name(report)["under way"]["duration"] >= 0
    assert timings.to_dict()["complete"]


def test_the_callback_is_called_at_both_ends_and_its_time_is_apart() -> None:
    calls: list[int] = []

    def synchronize() -> None:
        calls.append(len(timings.to_dict()["phases"]))
        for _ in range(1_000):
            pass

    with startup.collect_startup_timings(synchronize) as timings:
        assert calls == []
        with startup.phase("outer"):
            assert calls == [0]
            with startup.phase("inner"):
                pass
            assert calls == [0, 1, 2]
        assert calls == [0, 1, 2, 2]
    report = timings.to_dict()
    for phase in report["phases"]:
        assert phase["sync_before"] > 0 and 0 < phase["sync_inside"] <= phase["duration"]
    total = sum(phase["sync_before"] + phase["sync_inside"] for phase in report["phases"])
    assert abs(report["synchronization"] - total) < 1e-9
    assert "in the synchronization callback" in str(timings.report)


def test_phases_in_the_callback_do_not_call_it() -> None:
    calls = []

    def synchronize() -> None:
        calls.append(1)
        with startup.phase("waiting"):
            pass

    with startup.collect_startup_timings(synchronize) as timings, startup.phase("work"):
        pass
    assert len(calls) == 2
    assert [phase["name"] for phase in timings.to_dict()["phases"]] == ["waiting", "work", "waiting"]


def test_a_failing_callback_is_an_error_of_its_own_and_never_hides_the_bodys() -> None:
    failing = False

    def synchronize() -> None:
        if failing:
            raise RuntimeError("device lost")

    body = Odd("the body's")
    with startup.collect_startup_timings(synchronize) as timings:
        with pytest.raises(TimingError, match="device lost") as caught:
            with startup.phase("at the end"):
                failing = True
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(TimingError, match="before 'at the beginning'"):
            with startup.phase("at the beginning"):
                raise AssertionError("the body does not run")
        failing = False
        with pytest.raises(Odd) as hidden:
            with startup.phase("both"):
                failing = True
                raise body
        assert hidden.value is body
        failing = False
        with startup.phase("after"):
            pass
    report = timings.to_dict()
    endings = [(phase["name"], phase["status"], phase["error_type"]) for phase in report["phases"]]
    assert endings == [
        ("at the end", "error", "RuntimeError"),
        ("both", "error", "Odd"),
        ("after", "success", None),
    ]
    assert parents(report)["after"] is None
    assert any("device lost" in note for note in report["notes"])


def test_the_cuda_callback_does_nothing_before_cuda_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(1))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    startup.synchronize_cuda()
    assert calls == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    startup.synchronize_cuda()
    assert calls == [1]
    monkeypatch.setitem(sys.modules, "torch", None)
    startup.synchronize_cuda()
    assert calls == [1]


def test_what_is_loaded_later_counts_while_the_collector_is_open() -> None:
    class Pipeline:
        @startup.phase("component.vae")
        def vae(self) -> str:
            return "vae"

    with startup.collect_startup_timings() as timings:
        with startup.phase("pipeline.create"):
            pipeline = Pipeline()
        pipeline.vae()
    pipeline.vae()
    assert parents(timings.to_dict()) == {"pipeline.create": None, "component.vae": None}


def test_misuse_is_an_error_that_says_what_to_do(tmp_path: Any) -> None:
    with pytest.raises(TimingError, match="names of phases and counters are text"):
        startup.phase(5)  # type: ignore[arg-type]
    with pytest.raises(TimingError, match="cannot be called"):
        startup.collect_startup_timings(5)  # type: ignore[arg-type]
    for rank in (-1, True, "0", 1 << 32):
        with pytest.raises(TimingError, match="rank is"):
            startup.collect_startup_timings(rank=rank)  # type: ignore[arg-type]
    with pytest.raises(TimingError, match="cannot write .*missing"):
        with startup.collect_startup_timings(path=tmp_path / "missing" / "a.jsonl"):
            raise AssertionError("nothing is collected")
    assert not startup.current()
    timings = startup.collect_startup_timings()
    with pytest.raises(TimingError, match="nothing was collected"):
        timings.to_dict()
    with pytest.raises(TimingError, match="is not open"):
        timings.__exit__(None, None, None)
    with timings:
        with pytest.raises(TimingError, match="was used already"):
            timings.__enter__()
        with startup.phase("once") as phase:
            with pytest.raises(TimingError, match="is open already"):
                phase.__enter__()
            for wrong in (1.5, True, 1 << 63, "1"):
                with pytest.raises(TimingError, match="whole numbers"):
                    phase.count("bytes", wrong)  # type: ignore[arg-type]
        phase.__exit__(None, None, None)  # not open: nobody's concern
        with pytest.raises(TimingError, match="JSON can hold"):
            timings.add_facts(wrong=object())
        with pytest.raises(TimingError, match="JSON can hold"):
            timings.add_facts(wrong=float("nan"))
        timings.add_facts(mode="tiny")
    assert timings.to_dict()["environment"]["mode"] == "tiny"
    with pytest.raises(TimingError, match="while the collector is open"):
        timings.add_facts(late=1)
    with pytest.raises(TimingError, match="cannot write"):
        timings.save(tmp_path / "missing" / "a.json")
    with pytest.raises(TimingError, match="no format 'xml'"):
        timings.save(tmp_path / "a.xml", "xml")
    assert list(tmp_path.iterdir()) == []


def test_a_phase_object_can_be_used_again() -> None:
    again = startup.phase("again")
    with startup.collect_startup_timings() as timings:
        for _ in range(3):
            with again:
                pass
    assert [phase["name"] for phase in timings.to_dict()["phases"]] == ["again"] * 3
