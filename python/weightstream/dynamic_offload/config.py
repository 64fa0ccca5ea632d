"""`DynamicOffloadConfig`: DDO's fields. Those that mean something here work; another value of the rest is refused by name."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, Union

import torch
from torch import nn

__all__ = ["MODES", "DynamicOffloadConfig", "checked", "unknown"]

MODES = ("plan", "linear_runtime", "sdnq_runtime")
"""What `execution_mode` may be: nothing is offloaded, leaves stream, SDNQ layers stream."""
_WITHOUT = {
    "vmm_runtime": "linear_runtime streams at constant addresses already",
    "vmm_fast_runtime": "linear_runtime streams at constant addresses already",
}
_UNUSED = (
    "vmm_resident_weight_budget_gb vmm_staging_buffer_gb vmm_windows_file_read_chunk_mb vmm_virtual_host_transport "
    "vmm_native_transport vmm_source_cache_gb vmm_source_registered_gb vmm_module_pattern vmm_component_tensor_ownership "
    "vmm_float8_weight_only vmm_execution_auxiliary_ownership vmm_component_buffer_limit_mb vmm_page_mb "
    "vmm_dxgi_local_headroom_gb vmm_dxgi_shared_headroom_gb vmm_dxgi_system_headroom_gb vmm_host_cache_gb "
    "vmm_native_source_cache_slot_mb vmm_native_source_cache_slots vmm_pin_source_weights vmm_fault_fallback "
    "cache_pinned_weights pinned_weight_cache_namespace"
).split()
"""Fields that only say how DDO does what is done in another way here: any value but the default is refused."""
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "cache_plan": ((True,), "a plan takes milliseconds and is made anew for every module"),
    "auto_vram_headroom_gb": ((0.0,), "residents come from a calibration, whose headroom is profile_vram_headroom_gb"),
    "auto_full_pin_min_model_to_vram_ratio": ((4.0,), "all is page-locked that the limits allow, at any ratio"),
    "profile_resident_module_budget_gb": ((0.0,), "a profile is applied by its profile_name, at set-up"),
}
"""Fields whose other values would change nothing, what is taken (defaults, and those of presets), and why."""
_AMOUNTS = (
    "max_resident_module_budget_gb auto_vram_headroom_gb profile_vram_headroom_gb auto_full_pin_min_model_to_vram_ratio "
    "max_pin_weight_budget_gb available_system_ram_gb system_ram_headroom_gb pin_weight_budget_gb pin_weight_budget_ratio "
    "resident_module_budget_gb profile_resident_module_budget_gb small_tensor_threshold_bytes pin_cpu_workers"
).split()
_FLAGS = (
    "pin_cpu_memory",
    "build_profile",
    "linear_convolution_offload",
    "allow_pin_memory_fallback",
    "verbose",
    "show_profile",
)
_CHOICES = {
    "linear_runtime_strategy": ("functional", "swap"),
    "auto_budget_policy": ("off", "balanced"),
    "pin_weight_selection": ("spread", "first", "largest"),
    "resident_module_selection": ("spread",),
    "load_safetensors_backend": ("", "mmap"),
}


@dataclass
class DynamicOffloadConfig:
    """How a module is offloaded. Sizes are in GiB unless the name says otherwise.

    ValueError for a value that no field of that name can have, and for one that is not offered here.
    """

    execution_device: Union[str, torch.device] = "cuda:0"
    offload_device: Union[str, torch.device] = "cpu"
    target_module_classes: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding)
    skip_modules_pattern: tuple[str, ...] = ()
    always_resident_modules_pattern: tuple[str, ...] = ()
    small_tensor_threshold_bytes: int = 16 * 1024
    execution_mode: str = "plan"
    linear_runtime_strategy: str = "functional"
    linear_convolution_offload: bool = False
    vmm_resident_weight_budget_gb: float = 0.0
    vmm_staging_buffer_gb: float = 0.625
    vmm_windows_file_read_chunk_mb: int = 2
    vmm_virtual_host_transport: bool = False
    vmm_native_transport: bool = False
    vmm_source_cache_gb: float = 0.0
    vmm_source_registered_gb: float = 0.0
    vmm_module_pattern: str = ".*"
    vmm_component_tensor_ownership: bool = False
    vmm_float8_weight_only: bool = False
    vmm_execution_auxiliary_ownership: bool = False
    vmm_component_buffer_limit_mb: int = 1
    vmm_page_mb: int = 0
    vmm_dxgi_local_headroom_gb: float = 0.0
    vmm_dxgi_shared_headroom_gb: float = 0.0
    vmm_dxgi_system_headroom_gb: float = 0.0
    vmm_host_cache_gb: float = 0.0
    vmm_native_source_cache_slot_mb: int = 0
    vmm_native_source_cache_slots: int = 0
    vmm_pin_source_weights: bool = False
    vmm_fault_fallback: bool = False
    pin_cpu_memory: bool = False
    allow_pin_memory_fallback: bool = True
    pin_cpu_workers: int = 1
    cache_plan: bool = True
    cache_pinned_weights: bool = False
    pinned_weight_cache_namespace: str = ""
    auto_budget_policy: str = "off"
    max_resident_module_budget_gb: float = 6.0
    auto_vram_headroom_gb: float = 0.0
    profile_vram_headroom_gb: float = 1.0
    profile_name: str = ""
    build_profile: bool = False
    auto_full_pin_min_model_to_vram_ratio: float = 4.0
    profile_resident_module_budget_gb: float = 0.0
    _profile_budget_applied: bool = False
    max_pin_weight_budget_gb: float = 0.0
    available_system_ram_gb: float = 0.0
    system_ram_headroom_gb: float = 6.0
    pin_weight_budget_gb: float = 0.0
    pin_weight_budget_ratio: float = 0.0
    pin_weight_selection: str = "spread"
    resident_module_budget_gb: float = 0.0
    resident_module_patterns: Union[str, tuple[str, ...]] = ()
    resident_module_selection: str = "spread"
    load_safetensors_backend: str = ""
    verbose: bool = False
    show_profile: bool = True

    def __post_init__(self) -> None:
        """Checks every field."""
        mode = self.execution_mode
        if mode in _WITHOUT:
            raise ValueError(f"execution_mode={mode!r} is not offered: {_WITHOUT[mode]}")
        if mode not in MODES:
            raise ValueError(f"execution_mode={mode!r} is none of {', '.join(MODES)}")
        if self.load_safetensors_backend == "pread":
            raise ValueError(
                'load_safetensors_backend="pread" is not offered: give "mmap", which shows the file\'s pages and reads nothing '
                'twice, or "" for the loader\'s own'
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is none of {', '.join(map(repr, choices))}")
        if not self.allow_pin_memory_fallback:
            raise ValueError(
                "allow_pin_memory_fallback=False is not offered: what cannot be page-locked streams all the same"
            )
        for name in _FLAGS:
            if getattr(self, name) not in (True, False):
                raise ValueError(f"{name}={getattr(self, name)!r} is neither True nor False")
        for name in _AMOUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise ValueError(f"{name}={value!r} is no finite number from 0 on")
        if self.pin_cpu_workers != int(self.pin_cpu_workers) or self.pin_cpu_workers < 1:
            raise ValueError(f"pin_cpu_workers={self.pin_cpu_workers!r} is no number of threads")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in _UNUSED:
            if getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not offered: weights keep constant device addresses here, and only "
                    f"the default {defaults[name]!r} is taken"
                )
        for name, (taken, reason) in _FIXED.items():
            if getattr(self, name) not in taken:
                raise ValueError(f"{name}={getattr(self, name)!r} is not offered: {reason}; leave it at {taken[0]!r}")
        if self.resident_module_patterns not in ((), "", "auto", ("auto",)):
            raise ValueError(
                'resident_module_patterns is not offered: residents are spread over all modules; give () or "auto", or name '
                "modules that shall stay on the device in always_resident_modules_pattern"
            )
        for name in ("skip_modules_pattern", "always_resident_modules_pattern"):
            given = getattr(self, name)
            given = (given,) if isinstance(given, str) else given
            if not isinstance(given, (tuple, list)) or not all(isinstance(pattern, str) for pattern in given):
                raise ValueError(f"{name}={given!r} is no text and no tuple of texts")
            setattr(self, name, patterns := tuple(given))
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"{name}: {pattern!r} is no regular expression: {error}") from None
        classes = self.target_module_classes
        classes = (classes,) if isinstance(classes, type) else classes
        if not isinstance(classes, (tuple, list)) or not all(isinstance(one, type) for one in classes):
            raise ValueError(f"target_module_classes={classes!r} is no tuple of classes")
        self.target_module_classes = tuple(classes)
        if str(self.offload_device) not in ("cpu", "cpu:0", "host"):
            raise ValueError(f"offload_device={self.offload_device!r}: weights are offloaded to the CPU")
        if self.linear_convolution_offload and mode != "linear_runtime":
            raise ValueError(f"linear_convolution_offload needs execution_mode='linear_runtime', not {mode!r}")
        if not isinstance(self.profile_name, str):
            raise ValueError(f"profile_name={self.profile_name!r} is no text")
        if self.build_profile and not self.profile_name.strip():
            raise ValueError("build_profile needs a profile_name that is not blank")
        if self.build_profile and mode == "plan":
            raise ValueError("build_profile needs a runtime that streams; execution_mode='plan' offloads nothing")


FIELDS = frozenset(field.name for field in dataclasses.fields(DynamicOffloadConfig) if not field.name.startswith("_"))


def unknown(overrides: dict[str, Any]) -> None:
    """TypeError for a name that is no field. On every route: an option that means nothing is never swallowed."""
    wrong = sorted(set(overrides) - FIELDS)
    if wrong:
        raise TypeError(f"enable_offload has no option {', '.join(map(repr, wrong))}")


def checked(config: DynamicOffloadConfig, **overrides: Any) -> DynamicOffloadConfig:
    """A copy with other values, checked as a whole."""
    unknown(overrides)
    return dataclasses.replace(config, **overrides)
