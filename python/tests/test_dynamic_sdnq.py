"""Layers quantized by SDNQ on the dynamic route: packed tensors stream as they are, budgets are probed, and a probe that fails
costs nothing. The layers here have what SDNQ's have; those of the package itself are compared where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dynamic_models import DEVICE, TOKENS, plain, resident, same, untouched
from torch import Tensor, nn

from weightstream import dynamic_offload as ddo
from weightstream.dynamic_offload import enabling
from weightstream.dynamic_offload.calibration import GIB


class Packed(nn.Linear):
    """A linear layer of signed bytes with a scale a row, kept in parameters as SDNQ keeps them."""

    def __init__(self, dense: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = dense.in_features, dense.out_features
        scale = dense.weight.abs().amax(1, keepdim=True) / 127
        frozen = {"requires_grad": False}
        self.weight = nn.Parameter((dense.weight / scale).round().to(torch.int8), **frozen)
        self.scale = nn.Parameter(scale.float(), **frozen)
        self.svd_up = nn.Parameter(torch.randn(dense.out_features, 4, dtype=torch.bfloat16) / 64, **frozen)
        self.svd_down = nn.Parameter(torch.randn(4, dense.in_features, dtype=torch.bfloat16) / 64, **frozen)
        self.bias = dense.bias
        self.sdnq_dequantizer = {"result_dtype": torch.float32}

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() * self.scale + (self.svd_up @ self.svd_down).float()
        return nn.functional.linear(x, weight, self.bias)


def packed() -> nn.Module:
    model = plain()
    model.up, model.last = Packed(model.up), Packed(model.last)
    return model.eval().requires_grad_(False)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DDO_PROFILE_DIR", str(tmp_path))
    return tmp_path


class Script:
    """A device of 24 GiB, of which `peak` are in use in a region."""

    def __init__(self, peak: float) -> None:
        self.key: object = "scripted"
        self.peak = peak

    def synchronize(self) -> None:
        pass

    def total(self) -> int:
        return 24 * GIB

    def free(self) -> int:
        return 24 * GIB

    def reserved(self) -> int:
        return 0

    def reset_peak(self) -> None:
        pass

    def peak_reserved(self) -> int:
        return int(self.peak * GIB)


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(peak: float) -> None:
        monkeypatch.setattr(enabling, "DeviceMeter", lambda target: Script(peak))

    return use


def enable(model: nn.Module, **arguments: Any) -> ddo.DynamicOffloadApplyResult:
    options = {"execution_device": DEVICE, "environ": {}, "small_tensor_threshold_bytes": 0}
    return ddo.enable_offload(model, **{**options, **arguments})


def run(build: bool = False, error: BaseException | None = None, **arguments: Any) -> tuple[dict[str, Any], list[int]]:
    """One run with the profile "w". Also the resident budgets before, in and after its region."""
    model = packed()
    expected = resident(model, TOKENS)
    result = enable(model, profile_name="w", build_profile=build, **arguments)
    budgets = [result.event_payload["resident_module_budget_bytes"]]
    try:
        with result.profile_run() as report:
            budgets.append(result.event_payload["resident_module_budget_bytes"])
            assert same(model, expected)
            if error is not None:
                raise error
    except BaseException as raised:
        if raised is not error:
            raise
    budgets.append(result.event_payload["resident_module_budget_bytes"])
    assert same(model, expected)
    ddo.remove_dynamic_offload(model)
    assert untouched(model) and same(model, expected)
    return report, [round(budget / GIB, 3) for budget in budgets]


def test_packed_tensors_are_units_and_dense_layers_stay() -> None:
    model = packed()
    expected, before = resident(model, TOKENS), {name: p.dtype for name, p in model.named_parameters()}
    for arguments in (
        {"route": "dynamic"},
        {"profile_name": "w"},
        {"route": "dynamic", "execution_mode": "linear_runtime"},
    ):
        result = enable(model, **arguments)
        assert result.settings.config.execution_mode == "sdnq_runtime" and result.event_payload["units"] == 2
        stored = sum(p.nbytes for layer in (model.up, model.last) for p in layer.parameters())
        assert result.event_payload["pinning"]["candidate_bytes"] == stored
        assert same(model, expected)
        ddo.remove_dynamic_offload(model)
    assert {name: p.dtype for name, p in model.named_parameters()} == before


def test_auto_takes_groups_without_a_profile_and_calibrates_with_one() -> None:
    with pytest.warns(RuntimeWarning, match="small_tensor_threshold_bytes of model has no effect"):
        assert enable(packed(), apply_hook=False).route == "diffusers_group_offload"
    assert enable(packed(), apply_hook=False, profile_name="w").route == "dynamic_offload"
    assert enable(packed(), apply_hook=False, profile_name="w", build_profile=True).route == "dynamic_offload"
    with pytest.raises(ValueError, match="quantized by SDNQ"):
        enable(plain(), route="dynamic", execution_mode="sdnq_runtime")


def test_the_loader_does_not_take_packed_layers_for_dense_ones() -> None:
    class Loader:
        @staticmethod
        def from_pretrained(path: str) -> nn.Module:
            torch.manual_seed(7)
            return packed()

    torch.manual_seed(7)
    expected = resident(packed(), TOKENS)
    config = ddo.DynamicOffloadConfig(execution_device=DEVICE, execution_mode="linear_runtime")
    loaded = ddo.from_pretrained_with_dynamic_offload(
        "p", model_loader=Loader, dynamic_offload_config=config, apply_dynamic=True
    )
    assert same(loaded.module, expected)
    ddo.remove_dynamic_offload(loaded.module)


def test_a_baseline_without_room_for_a_probe_is_safe(peak: Any) -> None:
    for used, cap, room in ((21.5, 0, 1.5), (10, 0, 13), (20, 2.5, 3)):
        peak(used)
        report, budgets = run(True, max_resident_module_budget_gb=cap)
        assert report["profile_measurement_kind"] == "sdnq_baseline_safe" and budgets == [0, 0, 0]
        assert report["recommendation"]["resident_module_budget_gb"] == room


def test_a_probe_is_applied_in_its_region_only_and_settled_by_what_it_used(peak: Any) -> None:
    peak(20)
    report, _ = run(True)
    assert report["profile_measurement_kind"] == "sdnq_baseline_probe_pending"
    assert report["recommendation"]["resident_module_budget_gb"] == 3, "what is safe"
    assert report["recommendation"]["sdnq_probe_resident_budget_gb"] == 6
    # Without a region nothing is tried.
    model = packed()
    result = enable(model, profile_name="w")
    assert result._profile.report["status"] == "probing"
    assert result.event_payload["resident_module_budget_bytes"] == 3 * GIB
    ddo.remove_dynamic_offload(model)
    # Used with 6: 24.5 of 23, so that 4.5 would have been right.
    peak(24.5)
    report, budgets = run()
    assert budgets == [3, 6, 6] and report["profile_measurement_kind"] == "sdnq_probe"
    assert report["recommendation"]["resident_module_budget_gb"] == 4.5
    report, budgets = run()
    assert report["status"] == "applied" and budgets == [4.5, 4.5, 4.5]


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("no memory"), RuntimeError("x")])
def test_a_probe_that_fails_falls_back_to_safe_for_good(error: Exception, peak: Any, folder: Path) -> None:
    peak(20)
    run(True)
    report, budgets = run(error=error)
    assert report["status"] == "failed" and budgets == [3, 6, 3]
    report, budgets = run()
    assert report["status"] == "applied" and budgets == [3, 3, 3]
    (path,) = folder.glob("*.json")
    advice = json.loads(path.read_text())["entries"]["recommendation"]
    assert advice["profile_measurement_kind"] == "sdnq_baseline_safe" and "sdnq_probe_resident_budget_gb" not in advice


def test_a_probe_in_which_nothing_ran_is_tried_again(peak: Any, folder: Path) -> None:
    peak(20)
    run(True)
    (path,) = folder.glob("*.json")
    before = path.read_bytes()
    model = packed()
    result = enable(model, profile_name="w")
    with pytest.warns(RuntimeWarning, match="nothing of this"), result.profile_run() as report:
        pass
    assert report["status"] == "unmeasured" and path.read_bytes() == before
    assert result.event_payload["resident_module_budget_bytes"] == 3 * GIB
    with pytest.raises(RuntimeError, match="taken off inside"), result.profile_run():
        ddo.remove_dynamic_offload(model)
    assert path.read_bytes() == before
    assert run()[1] == [3, 6, 6]


def test_an_interrupted_probe_is_tried_again(peak: Any, folder: Path) -> None:
    peak(20)
    run(True)
    (path,) = folder.glob("*.json")
    before = path.read_bytes()
    report, budgets = run(error=KeyboardInterrupt())
    assert budgets == [3, 6, 3] and path.read_bytes() == before
    assert run()[1] == [3, 6, 6]


@pytest.mark.skipif(importlib.util.find_spec("sdnq") is None, reason="the package sdnq is not installed")
@pytest.mark.parametrize(
    "quantization", [{"weights_dtype": "int8"}, {"weights_dtype": "uint4"}, {"weights_dtype": "int4", "use_svd": True}]
)
def test_layers_of_the_package_itself(quantization: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDNQ_USE_TORCH_COMPILE", "0")  # compiled and plain dequantization differ in last bits
    sdnq = importlib.import_module("sdnq")

    model = plain()
    quantized = sdnq.sdnq_post_load_quant(model, **quantization)
    model = quantized[0] if isinstance(quantized, tuple) else quantized
    model.eval().requires_grad_(False)
    expected = resident(model, TOKENS)
    result = enable(model, route="dynamic")
    assert result.event_payload["units"] == 2 and same(model, expected)
    ddo.remove_dynamic_offload(model)
    assert same(model, expected)
