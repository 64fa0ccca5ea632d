"""`enable_offload`: resolves how a module is offloaded and does it; and the same for the modules of a pipeline."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Union

import torch
from torch import nn

from . import group, linear
from .arguments import check_arguments
from .calibration import DeviceMeter
from .config import DynamicOffloadConfig, checked, unknown
from .convolution import configuration as convolution_configuration
from .convolution import offload_convolutions
from .modules import modules_of
from .named import NamedProfile
from .presets import effective_preset
from .results import DynamicOffloadApplyResult
from .routes import CONVOLUTION, DYNAMIC, GROUP, choose, has_sdnq_layers
from .settings import DynamicOffloadSettings, load_dynamic_offload_settings_from_env, with_config
from .state import Applied, get_dynamic_offload_state, mark, remove_dynamic_offload
from .unused import given_fields, say, unused_arguments, unused_fields, unused_options
from .watching import watched

__all__ = ["enable_offload", "enable_pipeline_offload"]

log = logging.getLogger("weightstream.dynamic_offload")

_CUDA = "cuda:0"
_UNBUILT = {"build_profile": False}
_PROFILE = {"profile_name", "build_profile", "profile_vram_headroom_gb"}
"""Fields that never change a route."""


def enable_offload(
    module: nn.Module,
    *,
    settings: DynamicOffloadSettings | None = None,
    config: DynamicOffloadConfig | None = None,
    component: str = "model",
    preset: str = "auto",
    route: str | None = None,
    group_offload: bool | None = None,
    dynamic_offload: bool | None = None,
    offload_type: str | None = None,
    use_stream: bool | None = None,
    record_stream: bool | None = None,
    group_low_cpu_mem_usage: bool | None = None,
    num_blocks_per_group: int | None = None,
    execution_device: Union[str, torch.device] = _CUDA,
    offload_device: Union[str, torch.device] = "cpu",
    low_cpu_mem_usage: bool = True,
    running_on_wsl: bool | None = None,
    environ: Mapping[str, str] | None = None,
    use_environment: bool = True,
    apply_hook: bool = True,
    record_event: Any | None = None,
    dynamic_event_name: str | None = None,
    group_event_name: str | None = None,
    **config_overrides: Any,
) -> DynamicOffloadApplyResult:
    """Offloads a module, which is in CPU memory, in one of four ways.

    "dynamic_offload" streams its linear layers and embeddings through the engine; "linear_convolution" copies dense
    convolutions, too, around their calls; "diffusers_group_offload" is diffusers' own; "none" moves it to the device. The route is
    the argument, what `settings.component_policies` say of the component, what the environment says of it, what the preset
    says of it, or chosen. A profile's name never changes it.

    Further arguments are fields of `DynamicOffloadConfig`; TypeError for others, on every route. What was asked for and has no
    effect on the module's route is a RuntimeWarning and under "unused" in the result's `event_payload`. A module that is offloaded
    already is so anew: the earlier offload is off from then on. Refused for its arguments, it stays as it was; where setting up fails
    after that, and where `record_event` raises, it is not offloaded.
    """
    unknown(config_overrides)
    if not isinstance(module, nn.Module):
        raise TypeError(f"enable_offload takes a torch.nn.Module, not a {type(module).__name__}")
    check_arguments(
        {"preset": preset, "component": component},
        {"low_cpu_mem_usage": low_cpu_mem_usage, "use_environment": use_environment, "apply_hook": apply_hook},
        {
            "group_offload": group_offload,
            "dynamic_offload": dynamic_offload,
            "use_stream": use_stream,
            "record_stream": record_stream,
            "group_low_cpu_mem_usage": group_low_cpu_mem_usage,
            "running_on_wsl": running_on_wsl,
        },
        settings=settings,
        config=config,
        environ=environ,
        record_event=record_event,
        offload_type=offload_type,
        num_blocks_per_group=num_blocks_per_group,
    )
    effective_preset(preset)
    environ = (os.environ if environ is None else environ) if use_environment else {}
    given = config is not None
    whose = "settings" if settings is not None else "configuration" if given else None
    if settings is None:
        settings = load_dynamic_offload_settings_from_env(
            execution_device=execution_device,
            offload_device=offload_device,
            running_on_wsl=running_on_wsl,
            environ=environ,
            default_preset=preset,
        )
    config = settings.config if config is None else config
    manual = (given and config.resident_module_budget_gb > 0) or settings.manual_budget
    own = config_overrides.get("resident_module_budget_gb", 0)
    manual = manual or (isinstance(own, (int, float)) and own > 0)  # other types are refused with the other fields
    said = given_fields(config if given else None, config_overrides, settings)
    if str(offload_device) != "cpu":
        config_overrides = {"offload_device": offload_device, **config_overrides}
    if execution_device != _CUDA:
        config_overrides = {"execution_device": execution_device, **config_overrides}
    named = {name: value for name, value in config_overrides.items() if name in {*_PROFILE, "execution_mode"}}
    plain = not given and group_offload is None and dynamic_offload is None
    plain = plain and not set(config_overrides) - _PROFILE - {"execution_device", "offload_device"}
    profiled = checked(config, **{**named, **_UNBUILT})
    chosen = choose(
        module,
        component,
        settings,
        profiled,
        environ,
        route=route,
        group_offload=group_offload,
        dynamic_offload=dynamic_offload,
        convolutions=bool(config_overrides.get("linear_convolution_offload", config.linear_convolution_offload)),
        plain=plain,
    )
    build = bool(config_overrides.get("build_profile", config.build_profile))
    if build and chosen.route != DYNAMIC:
        raise ValueError(
            f"build_profile needs the route dynamic_offload; this module takes {chosen.route}, by {chosen.source}. Give "
            'route="dynamic_offload" to measure it'
        )
    if chosen.route == DYNAMIC:
        config_overrides = {**config_overrides, **_mode(module, checked(config, **{**config_overrides, **_UNBUILT}))}
    if chosen.route == CONVOLUTION:
        config = convolution_configuration(config if given else None, config, config_overrides)
    else:
        config = checked(config, **config_overrides)
    settings = with_config(settings, **{name: getattr(config, name) for name in _fields(config)})
    asked = {
        "offload_type": offload_type,
        "use_stream": use_stream,
        "record_stream": record_stream,
        "low_cpu_mem_usage": group_low_cpu_mem_usage,
        "num_blocks_per_group": num_blocks_per_group,
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    used: dict[str, Any] = {}
    if chosen.route == GROUP and apply_hook:
        used = group.resolved(config, {"low_cpu_mem_usage": low_cpu_mem_usage, **chosen.options, **asked})
    unused = {**unused_arguments(preset, running_on_wsl, whose), **unused_fields(chosen, said, config_overrides)}
    if chosen.route != GROUP or apply_hook:
        unused.update(unused_options(chosen, asked, used))
    say(unused, component)
    _take_off(module, apply_hook)
    start = time.perf_counter()
    result = DynamicOffloadApplyResult(
        module, settings=settings, route=chosen.route, should_move_to_execution_device=False
    )
    result.event_payload = {"component": component, "route": chosen.route, "route_source": chosen.source}
    if unused:
        result.event_payload["unused"] = unused
    if not apply_hook:
        result.event_payload["applied"] = False
        result.should_move_to_execution_device = True
        return result
    if chosen.route == DYNAMIC:
        _dynamic(result, config, manual)
    elif chosen.route == CONVOLUTION:
        result.hook = offload_convolutions(module, config)
        result._applied = Applied(CONVOLUTION, result.hook.remove, result.hook.runtime)
        result.event_payload.update(result.hook.setup())
        result._profile = NamedProfile.of(module, config)
    elif chosen.route == GROUP:
        result._applied = group.offload(module, config, used)
        result.event_payload.update(used)
    else:
        module.to(linear.compute_device(config.execution_device))
    if config.profile_name.strip() and chosen.route != DYNAMIC:
        result.event_payload["profile_unused"] = f"the route {chosen.route} has no resident budget"
    result.event_payload["seconds"] = time.perf_counter() - start
    if config.verbose:
        log.info(
            "%s: %s, set up in %.3f s: %s",
            component,
            chosen.route,
            result.event_payload["seconds"],
            result.event_payload,
        )
    if result._applied is not None:
        mark(module, result._applied)
    if record_event is not None:
        name = (group_event_name if chosen.route == GROUP else dynamic_event_name) or f"{component}_offload"
        try:
            record_event(name, result.event_payload["seconds"], **_plain_payload(result.event_payload))
        except BaseException:
            # The caller gets no result to take it off with.
            remove_dynamic_offload(module, recurse=False)
            raise
    return result


def _mode(module: nn.Module, config: DynamicOffloadConfig) -> dict[str, Any]:
    """The runtime of the dynamic route: SDNQ's where there are its layers, which a dense layer's would misread."""
    quantized = has_sdnq_layers(module)
    if config.execution_mode == "sdnq_runtime" and not quantized:
        raise ValueError("execution_mode='sdnq_runtime': no layer of this module is quantized by SDNQ")
    return {"execution_mode": "sdnq_runtime" if quantized else "linear_runtime"}


def _fields(config: DynamicOffloadConfig) -> list[str]:
    return [name for name in vars(config) if not name.startswith("_")]


def _plain_payload(payload: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in payload.items() if name != "seconds"}


def _take_off(module: nn.Module, apply_hook: bool) -> None:
    """Takes off what an earlier call put on the module."""
    applied = get_dynamic_offload_state(module)
    if applied is not None and apply_hook:
        remove_dynamic_offload(module, recurse=False)


def _dynamic(result: DynamicOffloadApplyResult, config: DynamicOffloadConfig, manual: bool) -> None:
    """The dynamic route, with the resident budget that is the caller's, the profile's, or 0 to build one."""
    profile = NamedProfile.of(result.module, config)
    current: list[linear.Dynamic] = []

    def stream(resident_gb: float) -> None:
        """Streams with this resident budget from now on."""
        if current:
            current.pop().attachment.detach()
        profiled = profile.build or profile.report["status"] in ("applied", "probing")
        dynamic = linear.stream_leaves(result.module, config, resident_gb, profiled)
        current.append(dynamic)
        result.hook = dynamic.attachment
        profile.meter = DeviceMeter(dynamic.attachment._runtime.target)
        profile.watch = partial(watched, dynamic.attachment, bool(dynamic.units))
        result.event_payload.update(dynamic.setup())

    def remove() -> None:
        if current:
            current[0].attachment.detach()
        profile.stream = None

    stream(profile.budget(config, manual))
    profile.stream = stream
    result._profile = profile
    result._applied = Applied(DYNAMIC, remove, lambda: current[0].runtime() if current else {})


def enable_pipeline_offload(
    pipeline: Any,
    *,
    settings: DynamicOffloadSettings | None = None,
    components: Mapping[str, nn.Module] | tuple[str, ...] | list[str] | None = None,
    preset: str = "auto",
    execution_device: Union[str, torch.device] = _CUDA,
    offload_device: Union[str, torch.device] = "cpu",
    low_cpu_mem_usage: bool = True,
    running_on_wsl: bool | None = None,
    environ: Mapping[str, str] | None = None,
    use_environment: bool = True,
    apply_hook: bool = True,
    record_event: Any | None = None,
    **config_overrides: Any,
) -> dict[str, DynamicOffloadApplyResult]:
    """`enable_offload` for each module of a pipeline, under its component's name; for all of them or for none. `pipeline` is an
    object with modules, or a dictionary of them by name."""
    modules = modules_of(pipeline, components)
    results: dict[str, DynamicOffloadApplyResult] = {}
    try:
        for name, module in modules.items():
            results[name] = enable_offload(
                module,
                settings=settings,
                component=name,
                preset=preset,
                execution_device=execution_device,
                offload_device=offload_device,
                low_cpu_mem_usage=low_cpu_mem_usage,
                running_on_wsl=running_on_wsl,
                environ=environ,
                use_environment=use_environment,
                apply_hook=apply_hook,
                record_event=record_event,
                **config_overrides,
            )
    except BaseException:
        for result in results.values():
            remove_dynamic_offload(result.module)
        raise
    return results
