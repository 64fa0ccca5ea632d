"""Routes, presets, settings: who decides how a module is offloaded, and what is refused on every way."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dynamic_models import DEVICE, TOKENS, plain, resident, same, untouched
from weightstream import DeviceError
from weightstream import dynamic_offload as ddo

ROUTES = ["dynamic_offload", "linear_convolution", "group", "none", "auto"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DDO_PROFILE_DIR", str(tmp_path))
    return tmp_path


def route_of(component: str = "model", **arguments: Any) -> str:
    arguments = {"execution_device": DEVICE, "environ": {}, "apply_hook": False, **arguments}
    return ddo.enable_offload(plain(), component=component, **arguments).route


def test_the_order_of_who_decides() -> None:
    policies = {"vae": {"route": "none"}}
    environ = {"DDO_VAE_ROUTE": "dynamic", "DDO_RUNNER_VAE_ROUTE": "group"}
    settings = ddo.load_dynamic_offload_settings_from_env(environ=environ, component_policies=policies)
    assert route_of("vae", settings=settings, environ=environ, route="group") == "diffusers_group_offload"
    assert route_of("vae", settings=settings, environ=environ) == "none"
    assert route_of("vae", environ=environ) == "dynamic_offload"
    del environ["DDO_VAE_ROUTE"]
    assert route_of("vae", environ=environ) == "diffusers_group_offload"
    assert route_of("vae", environ={"DDO_PRESET": "warm_process"}) == "none"
    assert route_of("vae") == "diffusers_group_offload", "the preset's"
    assert route_of("vae", group_offload=False) == "dynamic_offload", "a switch leaves the preset's out"
    assert route_of("vae", small_tensor_threshold_bytes=1) == "dynamic_offload", "and so does a field"
    assert route_of("transformer") == "dynamic_offload"
    assert route_of("transformer", group_offload=True) == "diffusers_group_offload"
    assert route_of("transformer", dynamic_offload=False) == "none"
    assert route_of("transformer", preset="off") == "none"
    assert route_of("text-encoder", environ={"DDO_TEXT_ENCODER_ROUTE": "off"}) == "none"


def test_every_combination_of_who_says_what() -> None:
    names = {"dynamic": "dynamic_offload", "group": "diffusers_group_offload", "off": "none"}
    model = plain()
    for said in itertools.product((None, "auto", *names), repeat=4):
        argument, policy, own, runner = said
        environ = {"DDO_PRESET": "warm_process"}
        environ.update({} if own is None else {"DDO_VAE_ROUTE": own})
        environ.update({} if runner is None else {"DDO_RUNNER_VAE_ROUTE": runner})
        policies = {} if policy is None else {"vae": {"route": policy}}
        settings = ddo.load_dynamic_offload_settings_from_env(environ=environ, component_policies=policies)
        result = ddo.enable_offload(
            model, component="vae", settings=settings, environ=environ, route=argument, apply_hook=False
        )
        first = next((word for word in said if word is not None), "off")  # the preset's for a vae is none
        assert result.route == names.get(first, "dynamic_offload"), said


def test_the_environment_wins_over_the_argument_and_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert route_of(preset="off", environ={"DDO_PRESET": "low_ram_safe"}) == "dynamic_offload"
    assert route_of(preset="off", environ={"DDO_PRESET": "low_ram_safe"}, use_environment=False) == "none"
    monkeypatch.setenv("DDO_PRESET", "off")
    assert route_of(environ=None) == "none"
    assert route_of(environ=None, use_environment=False) == "dynamic_offload"


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_not_known_is_refused_on_every_route(route: str) -> None:
    for component in ("model", "vae"):
        with pytest.raises(TypeError, match="resident_budget_gb"):
            route_of(component, route=route, resident_budget_gb=1)
        with pytest.raises(ValueError, match="there is no preset 'fast'"):
            route_of(component, route=route, preset="fast")
        with pytest.raises(ValueError, match="DDO_PRESET|there is no preset"):
            route_of(component, route=route, environ={"DDO_PRESET": "fast"})
        with pytest.raises(ValueError, match="vmm_page_mb"):
            route_of(component, route=route, vmm_page_mb=4)
    with pytest.raises(ValueError, match="no route 'cuda1'"):
        route_of(route="cuda1")
    with pytest.raises(ValueError, match="DDO_VAE_ROUTE"):
        route_of("vae", environ={"DDO_VAE_ROUTE": "fast"})
    with pytest.raises(ValueError, match="no option blocks"):
        settings = ddo.load_dynamic_offload_settings_from_env(environ={}, component_policies={"vae": {"blocks": 1}})
        route_of("vae", settings=settings)


def test_a_profiles_name_changes_no_route() -> None:
    for component in ("vae", "text_encoder", "transformer", "model"):
        for preset in ddo.DDO_PRESETS:
            assert route_of(component, preset=preset) == route_of(component, preset=preset, profile_name="w")
    pytest.importorskip("diffusers")
    result = ddo.enable_offload(plain(), component="vae", execution_device="host", environ={}, profile_name="w")
    assert result.route == "diffusers_group_offload" and "no resident budget" in result.event_payload["profile_unused"]
    with result.profile_run() as report:
        assert report is None


@pytest.mark.parametrize("route", ["linear_convolution", "group", "none"])
def test_only_the_dynamic_route_builds_a_profile(route: str) -> None:
    with pytest.raises(ValueError, match="build_profile needs the route dynamic_offload"):
        route_of(route=route, profile_name="w", build_profile=True)
    with pytest.raises(ValueError, match="by the preset one_shot_fast"):
        route_of("vae", profile_name="w", build_profile=True)
    for name in ("", "  "):
        with pytest.raises(ValueError, match="not blank"):
            route_of(profile_name=name, build_profile=True)


@pytest.mark.parametrize(
    "field, value",
    [
        ("execution_mode", "vmm_runtime"),
        ("execution_mode", "x"),
        ("linear_runtime_strategy", "x"),
        ("auto_budget_policy", "x"),
        ("resident_module_budget_gb", -1),
        ("resident_module_budget_gb", float("nan")),
        ("resident_module_budget_gb", "6"),
        ("profile_vram_headroom_gb", float("inf")),
        ("skip_modules_pattern", ("(",)),
        ("resident_module_patterns", ("blocks",)),
        ("cache_pinned_weights", True),
        ("allow_pin_memory_fallback", False),
        ("offload_device", "cuda"),
        ("profile_name", None),
        ("cache_plan", False),
        ("pin_cpu_workers", 0),
        ("pin_cpu_workers", 1.5),
        ("auto_vram_headroom_gb", 2),
        ("auto_full_pin_min_model_to_vram_ratio", 1),
        ("load_safetensors_backend", "pread"),
    ],
)
def test_values_that_no_field_has(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        ddo.DynamicOffloadConfig(**{field: value})


def test_settings_from_variables() -> None:
    environ = {
        "DDO_PROFILE_VRAM_HEADROOM_GB": "2.5",
        "DDO_SMALL_TENSOR_THRESHOLD_KB": "64",
        "DDO_PIN_CPU_MEMORY": "0",
        "DDO_SAFETENSORS_BACKEND": "mmap",
        "DDO_PIN_CPU_WORKERS": "2",
    }
    settings = ddo.load_dynamic_offload_settings_from_env(environ=environ, execution_device="host")
    config = settings.config
    assert (config.profile_vram_headroom_gb, config.small_tensor_threshold_bytes) == (2.5, 65536)
    assert (config.pin_cpu_memory, config.load_safetensors_backend, config.pin_cpu_workers) == (False, "mmap", 2)
    assert config.execution_mode == "linear_runtime" and settings.effective_preset == "one_shot_fast"
    for name, text in [
        ("DDO_PIN_CPU_MEMORY", "maybe"),
        ("DDO_PIN_CPU_WORKERS", "two"),
        ("DDO_SMALL_TENSOR_THRESHOLD_KB", "x"),
    ]:
        with pytest.raises(ValueError, match=name):
            ddo.load_dynamic_offload_settings_from_env(environ={name: text})
    wsl = ddo.load_dynamic_offload_settings_from_env(environ={}, running_on_wsl=True)
    assert wsl.requested_pin_cpu_memory and not wsl.config.pin_cpu_memory and wsl.effective_preset == "one_shot_fast"
    kept = ddo.load_dynamic_offload_settings_from_env(environ={"DDO_DISABLE_PIN_ON_WSL": "0"}, running_on_wsl=True)
    assert kept.config.pin_cpu_memory
    assert ddo.DynamicOffloadSettings.from_env(environ={}).preset_bool("DDO_PIN_CPU_MEMORY", environ={})


@pytest.mark.parametrize("route", ["dynamic", "linear_convolution", "group", "none"])
def test_every_route_gives_the_same_bits_and_is_taken_off(route: str) -> None:
    if route == "group":
        pytest.importorskip("diffusers")
    model = plain()
    expected = resident(model, TOKENS)
    before = {name: (p.data_ptr(), id(p)) for name, p in model.named_parameters()}
    options: dict[str, Any] = {"route": route, "execution_device": "host", "environ": {}}
    options.update({} if route in ("group", "none") else {"small_tensor_threshold_bytes": 0})
    for _ in range(2):
        result = ddo.enable_offload(model, **options)
        assert same(model, expected) and result.metrics_snapshot().as_dict()["route"] == result.route
        # A second call replaces the first.
        ddo.enable_offload(model, **options)
        assert same(model, expected)
        ddo.remove_dynamic_offload(model)
        ddo.remove_dynamic_offload(model)
        assert untouched(model) and same(model, expected)
        assert all(p.device.type == "cpu" and id(p) == before[name][1] for name, p in model.named_parameters())
    if route == "linear_convolution":
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == {n: a for n, (a, _) in before.items()}


def test_devices_that_nothing_streams_to() -> None:
    for device in ("cpu", "meta", "nonsense", 3.5):
        for route in ("dynamic", "linear_convolution"):
            model = plain()
            with pytest.raises(DeviceError):
                ddo.enable_offload(model, route=route, execution_device=device, environ={})  # type: ignore[arg-type]
            assert untouched(model)


def test_a_pipelines_modules_or_none_of_them() -> None:
    pytest.importorskip("diffusers")

    class Pipeline:
        def __init__(self) -> None:
            self.components = {"transformer": plain(), "vae": plain(1), "scheduler": object()}

    pipeline = Pipeline()
    parts = pipeline.components
    expected = {name: resident(parts[name], TOKENS) for name in ("transformer", "vae")}
    results = ddo.enable_pipeline_offload(pipeline, execution_device="host", environ={})
    assert {name: result.route for name, result in results.items()} == {
        "transformer": "dynamic_offload",
        "vae": "diffusers_group_offload",
    }
    assert all(same(parts[name], bits) for name, bits in expected.items())
    for result in results.values():
        ddo.remove_dynamic_offload(result.module)
    assert all(untouched(parts[name]) for name in expected)
    with pytest.raises(ValueError, match="no module unet"):
        ddo.enable_pipeline_offload(pipeline, components=["unet"], execution_device="host", environ={})
    broken = {"transformer": plain(), "vae": nn.Conv2d(1, 1, 1).eval()}
    with pytest.raises(ValueError, match="itself"):
        ddo.enable_pipeline_offload(
            None,
            components=broken,
            settings=ddo.load_dynamic_offload_settings_from_env(
                environ={}, component_policies={"vae": {"route": "linear_convolution"}}
            ),
            execution_device="host",
            environ={},
        )
    assert untouched(broken["transformer"])


def test_an_event_is_recorded() -> None:
    events: list[tuple[str, float, dict[str, Any]]] = []
    ddo.enable_offload(
        plain(),
        route="dynamic",
        execution_device=DEVICE,
        environ={},
        dynamic_event_name="offloaded",
        record_event=lambda name, seconds, **payload: events.append((name, seconds, payload)),
    )
    ((name, seconds, payload),) = events
    assert name == "offloaded" and seconds >= 0 and payload["route"] == "dynamic_offload"


def test_cleaning_up_after_an_error() -> None:
    model = plain()
    expected = resident(model, TOKENS)
    result = ddo.enable_offload(model, route="dynamic", execution_device=DEVICE, environ={})
    with result.cleanup_on_error() as inside:
        assert inside is result and same(model, expected)
    assert not untouched(model), "success leaves the offload"
    with pytest.raises(KeyboardInterrupt), result.cleanup_on_error():
        raise KeyboardInterrupt
    assert untouched(model) and same(model, expected)

    result = ddo.enable_offload(model, route="dynamic", execution_device=DEVICE, environ={})
    good = result._applied.remove

    def fails() -> None:
        raise OSError("the removal")

    result._applied.remove = fails
    with pytest.raises(ValueError, match="the first") as caught, result.cleanup_on_error():
        raise ValueError("the first")
    notes = getattr(caught.value, "__notes__", [getattr(caught.value, "dynamic_offload_cleanup_error", "")])
    assert "OSError: the removal" in notes[0]
    result._applied.remove = good
    ddo.remove_dynamic_offload(model)
    assert untouched(model)


def test_nothing_is_applied_without_apply_hook() -> None:
    model = plain()
    result = ddo.enable_offload(model, execution_device=DEVICE, environ={}, apply_hook=False)
    assert untouched(model) and result.event_payload["applied"] is False and result.should_move_to_execution_device
    assert torch.equal(resident(model, TOKENS), resident(plain(), TOKENS))


def test_an_event_that_fails_leaves_nothing_offloaded() -> None:
    def fails(*arguments: Any, **payload: Any) -> None:
        if payload["component"] == "b":
            raise OSError("the log")

    parts = {"a": plain(), "b": plain(1)}
    expected = {name: resident(part, TOKENS) for name, part in parts.items()}
    with pytest.raises(OSError, match="the log"):
        ddo.enable_pipeline_offload(
            None, components=parts, execution_device=DEVICE, environ={}, dynamic_offload=True, record_event=fails
        )
    for name, part in parts.items():
        assert untouched(part), name
        assert same(part, expected[name]), name
