"""Settings: a preset, the environment and what is to be done about components, resolved into one configuration."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

import torch
from torch import nn

from .config import DynamicOffloadConfig, checked
from .presets import DDO_PRESETS, component_policy, effective_preset

__all__ = ["DynamicOffloadSettings", "flag", "load_dynamic_offload_settings_from_env", "with_config"]

_LEAVES = (nn.Linear, nn.Embedding)
_NO_VARIABLE = {
    "execution_device",
    "offload_device",
    "target_module_classes",
    "skip_modules_pattern",
    "linear_convolution_offload",
    "profile_name",
    "build_profile",
    "small_tensor_threshold_bytes",
    "vmm_component_tensor_ownership",
    "vmm_float8_weight_only",
    "vmm_execution_auxiliary_ownership",
    "vmm_component_buffer_limit_mb",
    "profile_resident_module_budget_gb",
}
"""Fields that no variable sets."""


@dataclass(frozen=True)
class DynamicOffloadSettings:
    """What was asked for and what came of it."""

    requested_preset: str
    effective_preset: str
    enabled: bool
    plan: bool
    config: DynamicOffloadConfig
    requested_pin_cpu_memory: bool
    effective_pin_cpu_memory: bool
    disable_pin_on_wsl: bool
    running_on_wsl: bool
    component_policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    manual_budget: bool = False
    """Whether the resident budget is the caller's or the environment's, which a profile does not replace, and not the
    preset's, which it does."""

    @property
    def execution_mode(self) -> str:
        """The configuration's."""
        return self.config.execution_mode

    def preset_value(self, name: str, default: str = "", environ: Mapping[str, str] | None = None) -> str:
        """A variable, or what the preset sets the field of that name to, or the default, as text."""
        environ = os.environ if environ is None else environ
        value = DDO_PRESETS[self.effective_preset].get(name.removeprefix("DDO_").lower(), default)
        return environ.get(name, str(value))

    def preset_bool(self, name: str, default: str = "0", environ: Mapping[str, str] | None = None) -> bool:
        """The same as a switch."""
        return flag(name, self.preset_value(name, default, environ))

    def as_metrics(self) -> dict[str, Any]:
        """The settings as JSON has them."""
        values = {f.name: getattr(self.config, f.name) for f in dataclasses.fields(self.config)}
        return {
            "requested_preset": self.requested_preset,
            "effective_preset": self.effective_preset,
            "enabled": self.enabled,
            "running_on_wsl": self.running_on_wsl,
            "requested_pin_cpu_memory": self.requested_pin_cpu_memory,
            "effective_pin_cpu_memory": self.effective_pin_cpu_memory,
            "config": {name: _plain(value) for name, value in values.items() if not name.startswith("_")},
        }

    @classmethod
    def from_env(cls, **kwargs: Any) -> DynamicOffloadSettings:
        """`load_dynamic_offload_settings_from_env`."""
        return load_dynamic_offload_settings_from_env(**kwargs)


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, type):
        return value.__qualname__
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def flag(name: str, text: str) -> bool:
    """A switch as text; ValueError, naming the variable, for what is none."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"{name}={text!r} is no switch: give 1 or 0")


def running_wsl() -> bool:
    """Whether this is Linux in Windows."""
    try:
        return "microsoft" in Path("/proc/version").read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return False


def available_ram_gb() -> float:
    """What the system says that programs may take now, in GiB; 0 if it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemAvailable:")), 0.0)


def _read(name: str, field_: dataclasses.Field, text: str) -> Any:
    """A variable's text as its field has it."""
    default = field_.default
    try:
        if isinstance(default, bool):
            return flag(name, text)
        if isinstance(default, int):
            return int(text)
        if isinstance(default, float):
            return float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is no value for {field_.name}") from None
    if isinstance(default, tuple):
        return text if text == "auto" else tuple(part for part in text.split(";") if part)
    return text


def load_dynamic_offload_settings_from_env(
    *,
    execution_device: Union[str, torch.device] = "cuda:0",
    offload_device: Union[str, torch.device] = "cpu",
    target_module_classes: tuple[type[nn.Module], ...] = _LEAVES,
    skip_modules_pattern: tuple[str, ...] = (),
    always_resident_modules_pattern: tuple[str, ...] | None = None,
    running_on_wsl: bool | None = None,
    environ: Mapping[str, str] | None = None,
    default_preset: str = "",
    component_policies: Mapping[str, Mapping[str, Any]] | None = None,
) -> DynamicOffloadSettings:
    """Settings from variables: `DDO_PRESET`, else `default_preset`, and `DDO_` with a field's name in capitals over that."""
    environ = os.environ if environ is None else environ
    requested = environ.get("DDO_PRESET") or default_preset or "auto"
    preset = effective_preset(requested)
    values = dict(DDO_PRESETS[preset])
    given: set[str] = set()
    for known in dataclasses.fields(DynamicOffloadConfig):
        variable = f"DDO_{known.name.upper()}"
        if known.name in _NO_VARIABLE or known.name.startswith("_") or variable not in environ:
            continue
        values[known.name] = _read(variable, known, environ[variable])
        given.add(known.name)
    if "DDO_SMALL_TENSOR_THRESHOLD_KB" in environ:
        text = environ["DDO_SMALL_TENSOR_THRESHOLD_KB"]
        if not text.strip().isdigit():
            raise ValueError(f"DDO_SMALL_TENSOR_THRESHOLD_KB={text!r} is no whole number")
        values["small_tensor_threshold_bytes"] = 1024 * int(text)
    if "DDO_SAFETENSORS_BACKEND" in environ:
        values["load_safetensors_backend"] = environ["DDO_SAFETENSORS_BACKEND"]
    if always_resident_modules_pattern is not None:
        values["always_resident_modules_pattern"] = always_resident_modules_pattern
    values.setdefault("show_profile", False)
    if not values.get("available_system_ram_gb"):
        values["available_system_ram_gb"] = available_ram_gb()
    wsl = running_wsl() if running_on_wsl is None else running_on_wsl
    no_pins = flag("DDO_DISABLE_PIN_ON_WSL", environ.get("DDO_DISABLE_PIN_ON_WSL", "1"))
    wanted = bool(values.get("pin_cpu_memory", False))
    values["pin_cpu_memory"] = wanted and not (wsl and no_pins)
    config = DynamicOffloadConfig(
        execution_device=execution_device,
        offload_device=offload_device,
        target_module_classes=target_module_classes,
        skip_modules_pattern=skip_modules_pattern,
        **values,
    )
    return DynamicOffloadSettings(
        requested_preset=requested,
        effective_preset=preset,
        enabled=config.execution_mode != "plan",
        plan=config.execution_mode == "plan",
        config=config,
        requested_pin_cpu_memory=wanted,
        effective_pin_cpu_memory=config.pin_cpu_memory,
        disable_pin_on_wsl=no_pins,
        running_on_wsl=wsl,
        component_policies=dict(component_policies or {}),
        manual_budget="resident_module_budget_gb" in given and config.resident_module_budget_gb > 0,
    )


def with_config(settings: DynamicOffloadSettings, **overrides: Any) -> DynamicOffloadSettings:
    """The settings with other values in their configuration."""
    manual = settings.manual_budget or overrides.get("resident_module_budget_gb", 0) > 0
    return dataclasses.replace(settings, config=checked(settings.config, **overrides), manual_budget=manual)


def policy(settings: DynamicOffloadSettings, component: str) -> dict[str, Any]:
    """What the settings' own preset says of a component."""
    return component_policy(settings.effective_preset, component)
