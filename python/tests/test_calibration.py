"""Named profiles: what a calibration measures and keeps, and what later runs make of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from dynamic_models import DEVICE, TOKENS, plain, resident, same
from torch import nn

from weightstream import dynamic_offload as ddo
from weightstream.dynamic_offload.calibration import GIB
from weightstream.dynamic_offload.named import NamedProfile


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DDO_PROFILE_DIR", str(tmp_path / "profiles"))
    return tmp_path / "profiles"


class Script:
    """A device's figures as a test says them."""

    def __init__(
        self, total: float = 24, free: tuple[float, ...] = (20,), reserved: float = 2, peak: float = 2
    ) -> None:
        self.key: object = "scripted"
        self.figures = (total, reserved, peak)
        self.frees = list(free)
        self.resets = 0

    def synchronize(self) -> None:
        pass

    def total(self) -> int:
        return int(self.figures[0] * GIB)

    def free(self) -> int:
        return int((self.frees.pop(0) if len(self.frees) > 1 else self.frees[0]) * GIB)

    def reserved(self) -> int:
        return int(self.figures[1] * GIB)

    def reset_peak(self) -> None:
        self.resets += 1

    def peak_reserved(self) -> int:
        assert self.resets == 1
        return int(self.figures[2] * GIB)


def enable(model: nn.Module, name: str = "w", build: bool = False, **arguments: Any) -> ddo.DynamicOffloadApplyResult:
    options = {"execution_device": DEVICE, "environ": {}, "route": "dynamic_offload"}
    return ddo.enable_offload(model, profile_name=name, build_profile=build, **{**options, **arguments})


def calibrated(script: Script | None = None, name: str = "w", **arguments: Any) -> dict[str, Any]:
    """Calibrates a model with these figures and takes it off again."""
    model = plain()
    result = enable(model, name, True, **arguments)
    if script is not None:
        result._profile.meter = script
    with result.profile_run() as report:
        resident(model, TOKENS)
    ddo.remove_dynamic_offload(model)
    assert json.loads(json.dumps(report)) == report
    return report


def applied(name: str = "w", **arguments: Any) -> dict[str, Any]:
    model = plain()
    result = enable(model, name, **arguments)
    with result.profile_run() as report:
        resident(model, TOKENS)
    ddo.remove_dynamic_offload(model)
    return report


@pytest.mark.parametrize(
    "script, headroom, recommended",
    [
        # Used at the start 4, of which torch 2; torch's peak is 9: 2 + 9 = 11.
        (Script(24, (20,), 2, 9), 1, 12),
        (Script(24, (20,), 2, 9), 2.5, 10.5),
        # The driver's use at the end is the most.
        (Script(24, (20, 20, 7), 2, 3), 1, 6),
        # And never below 0.
        (Script(24, (20,), 2, 30), 1, 0),
        (Script(24, (20,), 2, 3), 30, 0),
        # Torch has more than the driver says is used: nothing else is there.
        (Script(24, (23,), 2, 9), 0, 15),
    ],
)
def test_the_recommendation_is_total_less_peak_less_headroom(
    script: Script, headroom: float, recommended: float
) -> None:
    report = calibrated(script, profile_vram_headroom_gb=headroom)
    assert report["status"] == "saved" and report["profile_measurement_kind"] == "baseline"
    assert report["recommendation"]["resident_module_budget_gb"] == recommended
    profile = ddo.load_dynamic_offload_profile({"name": "w", "model_class": "Plain"})
    assert profile["recommendation"]["resident_module_budget_gb"] == recommended
    assert profile["observations"][-1]["peak_vram_gb"] == report["peak_vram_gb"]


def test_the_headroom_is_the_environments() -> None:
    environ = {"DDO_PROFILE_VRAM_HEADROOM_GB": "3"}
    assert calibrated(Script(), environ=environ)["recommendation"]["resident_module_budget_gb"] == 17
    assert calibrated(Script(), environ={})["recommendation"]["resident_module_budget_gb"] == 19


def test_memory_given_back_before_the_end_counts() -> None:
    class Sampled(Script):
        """Shows 12 GiB in use to whoever asks while the region runs."""

        inside = False

        def free(self) -> int:
            return 12 * GIB if self.inside else 20 * GIB

    script = Sampled()
    model = plain()
    result = enable(model, build=True)
    result._profile.meter = script
    with result.profile_run() as report:
        resident(model, TOKENS)
        script.inside = True
        # Until the sampler has asked, however slow this machine is.
        while result._profile.region.sampled() < 12 * GIB:
            time.sleep(0.001)
        script.inside = False
    ddo.remove_dynamic_offload(model)
    assert report["recommendation"]["resident_module_budget_gb"] == 24 - 12 - 1


def test_a_calibration_has_no_residents_and_streams_what_is_kept_otherwise() -> None:
    model = plain()
    result = enable(
        model,
        build=True,
        resident_module_budget_gb=5,
        always_resident_modules_pattern="last",
        small_tensor_threshold_bytes=0,
    )
    runtime = result.metrics_snapshot().as_dict()["runtime"]
    assert runtime["bytes_by_placement"]["resident"] == 0 and result.event_payload["units"] == 4
    with result.profile_run():
        assert same(model, resident(plain(), TOKENS))
    ddo.remove_dynamic_offload(model)
    # Kept leaves are residents, and part of the budget that was measured.
    for budget, units in ((19, 3), (0.00001, 4)):
        calibrated(Script(peak=2 + 19 - budget, free=(20,)))
        model = plain()
        again = enable(model, always_resident_modules_pattern="last", small_tensor_threshold_bytes=0)
        assert again.event_payload["units"] == units
        ddo.remove_dynamic_offload(model)


def test_name_and_class_are_the_identity_and_nothing_else_is(folder: Path) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(512, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    calibrated(Script())
    calibrated(Script(), "w2")
    other = Other()
    result = enable(other, build=True)
    with result.profile_run():
        resident(other, torch.zeros(1, 512))
    ddo.remove_dynamic_offload(other)
    files = {path.name for path in folder.glob("*.json")}
    assert len(files) == 3
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text())
        assert set(content["identity"]) == {"name", "model_class"}
        assert content["entries"]["recommendation"]["execution_mode"] == "linear_runtime"
    # Another dtype and other weights are the same workload.
    model = plain(3, torch.bfloat16)
    assert enable(model)._profile.report["status"] == "applied"
    ddo.remove_dynamic_offload(model)


def test_reuse_override_and_cap() -> None:
    assert applied()["status"] == "missing"
    calibrated(Script())
    report = applied()
    assert (report["status"], report["resident_module_budget_gb"]) == ("applied", 19)
    assert applied(max_resident_module_budget_gb=4)["resident_module_budget_gb"] == 4
    assert applied(max_resident_module_budget_gb=0)["resident_module_budget_gb"] == 19
    for own in ({"resident_module_budget_gb": 0.001}, {"environ": {"DDO_RESIDENT_MODULE_BUDGET_GB": "0.001"}}):
        report = applied(**own)
        assert report["status"] == "disabled" and "resident budget was given" in report["reason"]
    # A preset's own budget does not switch profiles off.
    for preset in ("low_ram_safe", "warm_process", "wsl_compat"):
        report = applied(preset=preset)
        assert (report["status"], report["resident_module_budget_gb"]) == ("applied", 6)
    assert applied("")["status"] == "disabled"


def test_a_later_run_measures_nothing(folder: Path) -> None:
    calibrated(Script())
    (path,) = folder.glob("*.json")
    before = path.read_bytes()
    model = plain()
    result = enable(model)
    result._profile.meter = None
    for _ in range(2):
        with result.profile_run() as report:
            resident(model, TOKENS)
        assert report["status"] == "applied"
    with pytest.raises(ValueError), result.profile_run():
        raise ValueError
    assert path.read_bytes() == before
    ddo.remove_dynamic_offload(model)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_the_file_as_it_was(error: type[BaseException], folder: Path) -> None:
    calibrated(Script())
    (path,) = folder.glob("*.json")
    before = path.read_bytes()
    model = plain()
    result = enable(model, build=True)
    with pytest.raises(error), result.profile_run() as report:
        raise error
    assert report["status"] == "failed" and path.read_bytes() == before
    ddo.remove_dynamic_offload(model)
    assert calibrated(Script())["status"] == "saved", "the device is free again"


def test_a_process_killed_in_the_region_leaves_the_file_as_it_was(folder: Path) -> None:
    calibrated(Script())
    (path,) = folder.glob("*.json")
    before = path.read_bytes()
    code = """
        import os, signal, sys
        sys.path.insert(0, sys.argv[1])
        from dynamic_models import DEVICE, plain
        from weightstream import dynamic_offload as ddo
        options = {"execution_device": DEVICE, "environ": {}, "route": "dynamic_offload"}
        result = ddo.enable_offload(plain(), profile_name="w", build_profile=True, **options)
        with result.profile_run():
            os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(Path(__file__).parent)]
    ended = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert path.read_bytes() == before


def test_one_region_a_device_at_a_time() -> None:
    first, second = plain(), plain(1)
    results = [enable(first, "a", True), enable(second, "b", True)]
    for result in results:
        result._profile.meter = Script()
    with results[0].profile_run():
        with pytest.raises(RuntimeError, match="one at a time"), results[1].profile_run():
            pass
        with pytest.raises(RuntimeError, match="measured already"), results[0].profile_run():
            pass
        resident(first, TOKENS)
    with results[1].profile_run() as report:
        resident(second, TOKENS)
    assert report["status"] == "saved"
    for model in (first, second):
        ddo.remove_dynamic_offload(model)


def test_a_damaged_profile_is_missing_with_a_notice(folder: Path) -> None:
    calibrated(Script())
    (path,) = folder.glob("*.json")
    path.write_bytes(b"\xff\x00")
    with pytest.warns(RuntimeWarning, match="set aside"):
        assert applied()["status"] == "missing"


def test_a_fresh_profile_is_disabled_without_a_name() -> None:
    config = ddo.DynamicOffloadConfig()
    profile = NamedProfile.of(plain(), config)
    assert profile.budget(config, False) == 0 and profile.report == {"name": "", "status": "disabled"}


def test_a_region_without_its_offload_measures_nothing(folder: Path) -> None:
    model = plain()
    result = enable(model, build=True)
    with pytest.raises(RuntimeError, match="taken off inside"), result.profile_run():
        ddo.remove_dynamic_offload(model)
    with pytest.raises(RuntimeError, match="taken off"), result.profile_run():
        pass
    assert not list(folder.glob("*.json"))


def test_a_region_that_failed_may_be_measured_again() -> None:
    model = plain()
    result = enable(model, build=True)
    with pytest.raises(KeyboardInterrupt), result.profile_run():
        raise KeyboardInterrupt
    with result.profile_run() as report:
        resident(model, TOKENS)
    assert report["status"] == "saved"
    ddo.remove_dynamic_offload(model)


def test_a_recommendation_beyond_every_device_makes_all_resident() -> None:
    model = plain()
    expected = resident(model, TOKENS)
    context = {"name": "w", "model_class": "Plain"}
    ddo.record_dynamic_offload_profile(context, {"status": "observed"}, None, {"resident_module_budget_gb": 1e300})
    result = enable(model, max_resident_module_budget_gb=0)
    assert result._profile.report["status"] == "applied"
    assert same(model, expected)
    ddo.remove_dynamic_offload(model)
