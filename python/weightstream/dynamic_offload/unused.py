"""What a caller asked for that the chosen route has no use for: it is said, never swallowed.

What a preset or the environment sets is for all routes and is not the caller's word about one, but for the resident budget,
which is a promise of how much of the device is left.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from ..levels import levels_outside
from .config import DynamicOffloadConfig
from .presets import DDO_PRESETS
from .routes import CONVOLUTION, DYNAMIC, GROUP, NONE, Choice
from .settings import DynamicOffloadSettings

__all__ = ["given_fields", "say", "unused_arguments", "unused_fields", "unused_options"]

_PINNING = (
    "pin_cpu_memory pin_weight_budget_gb pin_weight_budget_ratio max_pin_weight_budget_gb pin_weight_selection "
    "system_ram_headroom_gb"
).split()
_RESIDENTS = (
    "resident_module_budget_gb max_resident_module_budget_gb always_resident_modules_pattern resident_module_patterns "
    "auto_budget_policy"
).split()
_LAYERS = "target_module_classes skip_modules_pattern small_tensor_threshold_bytes linear_runtime_strategy".split()
_STREAMING = {*_PINNING, *_RESIDENTS, *_LAYERS, "execution_mode", "linear_convolution_offload", "pin_cpu_workers"}
_FIELDS = {
    DYNAMIC: {"linear_convolution_offload"},
    CONVOLUTION: {"pin_cpu_workers", "max_resident_module_budget_gb", "linear_runtime_strategy"},
    GROUP: _STREAMING,
    NONE: _STREAMING,
}
"""Fields by the routes that have no use for them. What the convolution route refuses is not among them."""
_WHY = {
    DYNAMIC: 'convolutions stay on the device there; give route="linear_convolution"',
    CONVOLUTION: "nothing stays on the device but what is no convolution and no linear layer, and nothing is copied by threads",
    GROUP: 'diffusers moves whole layers or blocks there; give route="dynamic_offload" to stream within a budget',
    NONE: 'all of the module is on the device there; give route="dynamic_offload" to stream within a budget',
}
_FOR_LOADING = "load_safetensors_backend"


def given_fields(
    config: DynamicOffloadConfig | None,
    overrides: Mapping[str, Any],
    settings: DynamicOffloadSettings,
) -> set[str]:
    """The fields that the caller gave another value than their default, or in a configuration than the preset's."""
    defaults = {field.name: field.default for field in dataclasses.fields(DynamicOffloadConfig)}
    given = {name for name, value in overrides.items() if value != defaults[name]}
    if config is not None:
        usual = {**defaults, **DDO_PRESETS[settings.effective_preset]}
        given |= {
            name
            for name in _STREAMING
            if name not in overrides and getattr(config, name) not in (defaults[name], usual[name])
        }
    elif settings.manual_budget and "resident_module_budget_gb" not in overrides:
        given.add("resident_module_budget_gb")
    return given


def unused_fields(chosen: Choice, given: set[str], overrides: Mapping[str, Any]) -> dict[str, str]:
    """Which of these fields have no effect on the route, and why."""
    why = f"the route {chosen.route}, by {chosen.source}, has no use for it: {_WHY[chosen.route]}"
    said = {name: why for name in sorted(given & _FIELDS[chosen.route])}
    if _FOR_LOADING in given and overrides.get(_FOR_LOADING):
        said[_FOR_LOADING] = "the module is loaded already; from_pretrained_with_dynamic_offload takes it"
    return said


def unused_options(chosen: Choice, asked: Mapping[str, Any], used: Mapping[str, Any]) -> dict[str, str]:
    """Which options of group offload have no effect, and why. `asked` are those given; `used` what the group route made of them."""
    if chosen.route != GROUP:
        why = f"it is an option of the route {GROUP}, and this module takes {chosen.route}, by {chosen.source}"
        return {_argument(name): why for name in asked}
    said = {}
    for name, value in asked.items():
        if used.get(name) == value or (value is False and not used.get(name)):
            continue
        if name == "num_blocks_per_group":
            said[name] = 'groups are single leaves; give offload_type="block_level"'
        elif name == "record_stream" and not used.get("use_stream"):
            said[name] = "it is about a stream, and use_stream is not on"
        else:
            said[_argument(name)] = "this device, or this version of diffusers, does not have it"
    return said


def _argument(name: str) -> str:
    """The argument of `enable_offload` that an option comes from."""
    return "group_low_cpu_mem_usage" if name == "low_cpu_mem_usage" else name


def unused_arguments(preset: str, wsl: bool | None, whose: str | None) -> dict[str, str]:
    """Which arguments have no effect since settings or a configuration (`whose`) say what they would, and why."""
    if whose is None:
        return {}
    said = {"preset": preset.strip().lower() not in ("", "auto"), "running_on_wsl": wsl is not None}
    return {name: f"the {whose} that was given says it" for name, given in said.items() if given}


def say(unused: Mapping[str, str], component: str) -> None:
    """Warns of it, each reason once."""
    reasons: dict[str, list[str]] = {}
    for name, why in unused.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        effect = "has no effect" if len(names) == 1 else "have no effect"
        warnings.warn(f"{', '.join(names)} of {component} {effect}: {why}", RuntimeWarning, stacklevel=levels_outside())
