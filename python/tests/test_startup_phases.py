"""The phases that loading and attaching record: names, order, who contains whom."""

from __future__ import annotations

from pathlib import Path

import pytest
from attach_models import host, inputs, mlp, run, weight_bytes
from offload_files import empty, small
from startup_reports import by_name, parents

import weightstream
from weightstream import BudgetError, LoadingCancelled, WeightsError, offload, startup


def test_attaching_records_its_steps() -> None:
    model = mlp(6)
    with startup.collect_startup_timings() as timings:
        with startup.phase("start"):
            attachment = weightstream.attach(model, device=host(), budget=int(weight_bytes(model) * 0.6))
        run(model, inputs())
    attachment.detach()
    report = timings.to_dict()
    steps = ["attach.device", "attach.plan", "attach.page_lock", "attach.upload", "attach.bind"]
    assert [phase["name"] for phase in report["phases"]] == ["start", "attach", *steps]
    assert parents(report) == {"start": None, "attach": "start", **dict.fromkeys(steps, "attach")}
    assert {phase["status"] for phase in report["phases"]} == {"success"}
    assert by_name(report)["attach.page_lock"]["counters"]["weights.bytes"] == weight_bytes(model)


def test_a_refused_attach_is_an_error_in_its_phase() -> None:
    with startup.collect_startup_timings() as timings:
        with pytest.raises(BudgetError):
            weightstream.attach(mlp(6), device=host(), budget=1)
        assert not startup.current()._node.id  # nothing is left open
    endings = {phase["name"]: (phase["status"], phase["error_type"]) for phase in timings.to_dict()["phases"]}
    assert endings["attach"] == endings["attach.plan"] == ("error", "BudgetError")
    assert endings["attach.device"] == ("success", None)


def test_loading_records_its_stages_and_its_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    offload.save_model(small(), path)
    with startup.collect_startup_timings() as timings:
        offload.load_model_data(empty(), path)
        offload.load_sd(path)
    report = timings.to_dict()
    names = [phase["name"] for phase in report["phases"]]
    stages = ["offload.read", "offload.prepare", "offload.apply"]
    assert names == ["offload.load_model_data", *stages, "offload.load_sd", "offload.read"]
    assert [phase["parent_id"] for phase in report["phases"]] == [None, 1, 1, 1, None, 5]
    facts = report["environment"]["checkpoint model.safetensors"]
    assert facts["bytes"] == path.stat().st_size and 0.0 <= facts["resident_fraction"] <= 1.0


def test_a_load_that_fails_or_is_cancelled_ends_its_stage_with_the_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    offload.save_model(small(), path)
    aborting = offload.LoadingCallback(abort_requested=lambda: True)
    with startup.collect_startup_timings() as timings:
        with pytest.raises(WeightsError):
            offload.load_model_data(empty(), [path, {"nobody's": small().state_dict().popitem()[1]}])
        try:
            raise KeyError("handled")
        except KeyError:
            # What is being handled around a load is not what ends its stages.
            offload.load_sd(path)
        with pytest.raises(LoadingCancelled), offload.loading_context(None):
            with offload.loading_context(offload.LoadingCallback()):
                pass
            _cancelled(path, aborting)
    report = timings.to_dict()
    endings = [(phase["name"], phase["error_type"]) for phase in report["phases"]]
    assert endings[:4] == [
        ("offload.load_model_data", "WeightsError"),
        ("offload.read", None),
        ("offload.prepare", None),
        ("offload.apply", "WeightsError"),
    ]
    assert endings[4:6] == [("offload.load_sd", None), ("offload.read", None)]
    assert endings[6:] == [("offload.load_sd", "LoadingCancelled"), ("offload.read", "LoadingCancelled")]


def _cancelled(path: Path, aborting: offload.LoadingCallback) -> None:
    """A load that is aborted at its first stage."""
    from weightstream.offload.progress import _context

    token = _context.set((aborting, {}))
    try:
        offload.load_sd(path)
    finally:
        _context.reset(token)
