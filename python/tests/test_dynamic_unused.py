"""What was asked for and has no effect on a module's route: it acts, is refused, or is said."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from convolution_models import image, net
from dynamic_models import DEVICE, TOKENS, plain, resident, same, untouched
from torch import nn

from weightstream import dynamic_offload as ddo
from weightstream.dynamic_offload.calibration import GIB

PLAN = ddo.DynamicOffloadConfig()


def enable(model: nn.Module | None = None, **arguments: Any) -> ddo.DynamicOffloadApplyResult:
    options = {"execution_device": DEVICE, "environ": {}, "apply_hook": False}
    return ddo.enable_offload(plain() if model is None else model, **{**options, **arguments})


@pytest.mark.parametrize(
    "arguments, fields",
    [
        # A resident budget without a mode that streams.
        ({"config": ddo.DynamicOffloadConfig(resident_module_budget_gb=4)}, ["resident_module_budget_gb"]),
        ({"preset": "off", "resident_module_budget_gb": 4}, ["resident_module_budget_gb"]),
        ({"environ": {"DDO_PRESET": "off", "DDO_RESIDENT_MODULE_BUDGET_GB": "4"}}, ["resident_module_budget_gb"]),
        ({"route": "none", "resident_module_budget_gb": 4}, ["resident_module_budget_gb"]),
        ({"dynamic_offload": False, "pin_weight_budget_gb": 4.0}, ["pin_weight_budget_gb"]),
        (
            {"route": "none", "execution_mode": "sdnq_runtime", "skip_modules_pattern": "x", "pin_cpu_workers": 2},
            ["execution_mode", "pin_cpu_workers", "skip_modules_pattern"],
        ),
        (
            {"group_offload": True, "always_resident_modules_pattern": "x", "max_resident_module_budget_gb": 3},
            ["always_resident_modules_pattern", "max_resident_module_budget_gb"],
        ),
        ({"route": "dynamic", "linear_convolution_offload": True}, ["linear_convolution_offload"]),
        ({"route": "linear_convolution", "pin_cpu_workers": 2}, ["pin_cpu_workers"]),
        ({"load_safetensors_backend": "mmap"}, ["load_safetensors_backend"]),
        # Options of group offload elsewhere.
        ({"route": "none", "offload_type": "leaf_level", "use_stream": False}, ["offload_type", "use_stream"]),
        ({"route": "dynamic", "num_blocks_per_group": 2}, ["num_blocks_per_group"]),
        (
            {"route": "none", "group_low_cpu_mem_usage": True, "record_stream": True},
            ["group_low_cpu_mem_usage", "record_stream"],
        ),
        # What settings or a configuration say already.
        ({"settings": ddo.load_dynamic_offload_settings_from_env(environ={}), "preset": "off"}, ["preset"]),
        ({"config": PLAN, "preset": "low_ram_safe", "running_on_wsl": True}, ["preset", "running_on_wsl"]),
    ],
)
def test_what_has_no_effect_is_said(arguments: dict[str, Any], fields: list[str]) -> None:
    with pytest.warns(RuntimeWarning, match="no effect") as caught:
        result = enable(**arguments)
    assert sorted(result.event_payload["unused"]) == fields
    text = " ".join(str(one.message) for one in caught)
    assert all(name in text for name in fields) and all(one.filename == __file__ for one in caught)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"route": "none"},
        {"route": "none", "config": PLAN},
        # A preset's fields, and defaults that are repeated, are no word about this module.
        {"route": "none", "preset": "warm_process"},
        {"route": "none", "resident_module_budget_gb": 0, "pin_cpu_memory": False},
        {"route": "none", "config": ddo.load_dynamic_offload_settings_from_env(environ={}).config},
        {"resident_module_budget_gb": 4, "pin_weight_budget_gb": 1, "pin_cpu_workers": 2},
        {"route": "linear_convolution", "linear_convolution_offload": True, "pin_weight_budget_gb": 1},
        {"route": "group", "low_cpu_mem_usage": False, "offload_type": "block_level", "num_blocks_per_group": 2},
    ],
)
def test_what_has_an_effect_is_not(arguments: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "unused" not in enable(**arguments).event_payload


def test_a_warning_that_is_an_error_leaves_the_module_as_it_was() -> None:
    model = plain()
    for route in ("none", "dynamic"):
        with (
            warnings.catch_warnings(),
            pytest.raises(RuntimeWarning, match="num_blocks_per_group of model has no effect"),
        ):
            warnings.simplefilter("error")
            enable(model, route=route, apply_hook=True, num_blocks_per_group=2)
        assert untouched(model)


def test_options_that_group_offload_drops_are_said() -> None:
    pytest.importorskip("diffusers")
    model = plain()
    asked = {"use_stream": True, "record_stream": True, "num_blocks_per_group": 2, "execution_device": "host"}
    with pytest.warns(RuntimeWarning, match="no effect"):
        result = enable(model, route="group", apply_hook=True, **asked)
    assert set(result.event_payload["unused"]) == {"use_stream", "record_stream", "num_blocks_per_group"}
    ddo.remove_dynamic_offload(model)


def test_a_mode_that_is_given_decides_the_route() -> None:
    for mode, route in (("linear_runtime", "dynamic_offload"), ("plan", "none")):
        assert enable(config=PLAN, execution_mode=mode).route == route
        assert enable(preset="off", execution_mode=mode).route == route
        assert enable(execution_mode=mode).route == route


def test_convolutions_that_shall_be_offloaded_are() -> None:
    model, x = net(), image()
    expected = resident(model, x)
    config = ddo.DynamicOffloadConfig(execution_mode="linear_runtime", linear_convolution_offload=True)
    for arguments in ({"config": config}, {"linear_convolution_offload": True}):
        result = enable(model, apply_hook=True, execution_device="host", small_tensor_threshold_bytes=0, **arguments)
        assert result.route == "linear_convolution" and result.event_payload["convolutions"] == 4
        assert torch.equal(resident(model, x), expected)
        ddo.remove_dynamic_offload(model)
    with pytest.warns(RuntimeWarning, match="linear_convolution_offload of model has no effect"):
        assert enable(net(), config=config, dynamic_offload=False).route == "none"


def test_the_convolution_route_keeps_to_limits_of_page_locking() -> None:
    model = net()
    for budget, decided in ((0.0, "candidate"), (1000 / GIB, "pin_weight_budget_gb")):
        arguments = {"execution_device": "host", "small_tensor_threshold_bytes": 0, "pin_weight_budget_gb": budget}
        result = enable(model, route="linear_convolution", apply_hook=True, **arguments)
        pinning = result.event_payload["pinning"]
        assert pinning["decided_by"] == decided and pinning["budget_bytes"] == (
            1000 if budget else pinning["candidate_bytes"]
        )
        ddo.remove_dynamic_offload(model)


def test_a_profile_is_unused_where_nothing_is_resident(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDO_PROFILE_DIR", str(tmp_path))
    for route in ("linear_convolution", "none"):
        model = net()
        result = enable(model, route=route, profile_name="w", apply_hook=True, execution_device="host")
        assert "no resident budget" in result.event_payload["profile_unused"]
        ddo.remove_dynamic_offload(model)


def test_a_budget_that_only_ddo_itself_sets_is_refused() -> None:
    with pytest.raises(ValueError, match="profile_resident_module_budget_gb.*profile_name"):
        ddo.DynamicOffloadConfig(profile_resident_module_budget_gb=2)


def test_where_weights_go_is_refused_beside_settings_too() -> None:
    settings = ddo.load_dynamic_offload_settings_from_env(environ={})
    with pytest.raises(ValueError, match="offloaded to the CPU"):
        enable(settings=settings, offload_device="cuda")


def test_shapes_of_pipelines() -> None:
    model = plain()
    expected = resident(model, TOKENS)

    class Pipeline:
        def __init__(self) -> None:
            self.transformer = model

    options: dict[str, Any] = {"execution_device": DEVICE, "environ": {}, "dynamic_offload": True}
    for pipeline in (Pipeline(), {"transformer": model, "vae": None}):
        for components in (None, ("transformer",), {"transformer": model}):
            results = ddo.enable_pipeline_offload(pipeline, components=components, **options)
            assert list(results) == ["transformer"] and same(model, expected)
            ddo.remove_dynamic_offload(model)
    for pipeline, components, error, words in [
        (model, None, TypeError, "one module and no pipeline"),
        ([model], None, TypeError, "a list is no pipeline"),
        (None, None, TypeError, "a NoneType is no pipeline"),
        (object(), None, TypeError, "a object is no pipeline"),
        ({}, None, ValueError, "has no module: there is nothing"),
        (Pipeline(), {}, ValueError, "components is empty"),
        (Pipeline(), [], ValueError, "components is empty"),
        (Pipeline(), "transformer", TypeError, "no list of names"),
        (Pipeline(), [model], TypeError, "no list of names"),
        (Pipeline(), {"vae": None}, TypeError, "'vae' is a NoneType"),
        (Pipeline(), ["transformer", "vae"], ValueError, "no module vae; it has transformer"),
    ]:
        with pytest.raises(error, match=words):
            ddo.enable_pipeline_offload(pipeline, components=components, **options)
        assert untouched(model)
