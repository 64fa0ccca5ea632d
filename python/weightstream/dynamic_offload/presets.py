"""The presets: what settings are where neither argument nor environment says otherwise."""

from __future__ import annotations

from typing import Any

__all__ = ["DDO_PRESETS", "component_policy", "effective_preset", "resolve_dynamic_offload_preset"]

_ALWAYS = r"(^|\.)(proj_in|time_embed.*|prompt_adaln.*|norm_out.*|proj_out)(\.|$)"
_LINEAR: dict[str, Any] = {
    "execution_mode": "linear_runtime",
    "small_tensor_threshold_bytes": 1024 * 1024,
    "always_resident_modules_pattern": (_ALWAYS,),
    "resident_module_patterns": "auto",
    "system_ram_headroom_gb": 6.0,
    "pin_cpu_workers": 4,
}
_LEAF = {"route": "diffusers_group_offload", "offload_type": "leaf_level"}
_STILL = {**_LEAF, "use_stream": False, "record_stream": False}

DDO_PRESETS: dict[str, dict[str, Any]] = {
    "off": {"execution_mode": "plan"},
    "one_shot_fast": {
        **_LINEAR,
        "pin_cpu_memory": True,
        "auto_budget_policy": "balanced",
        "max_resident_module_budget_gb": 0.0,
        "system_ram_headroom_gb": 8.0,
    },
    "warm_process": {**_LINEAR, "pin_cpu_memory": True, "resident_module_budget_gb": 6.0},
    "low_ram_safe": {**_LINEAR, "resident_module_budget_gb": 3.0},
    "wsl_compat": {**_LINEAR, "resident_module_budget_gb": 6.0},
    "diffusers_leaf_offload_compat": {"execution_mode": "plan"},
    "diffusers_offload_compat": {"execution_mode": "plan"},
}
"""The fields of the configuration that each preset sets."""

_COMPONENTS: dict[str, dict[str, dict[str, Any]]] = {
    "one_shot_fast": {"text_encoder": _LEAF, "vae": _STILL},
    "low_ram_safe": {"text_encoder": _LEAF, "vae": _STILL},
    "warm_process": {"text_encoder": _LEAF, "vae": {"route": "none"}},
    "wsl_compat": {"text_encoder": _LEAF, "vae": {"route": "none"}},
    "diffusers_leaf_offload_compat": {"text_encoder": _LEAF, "transformer": _LEAF},
    "diffusers_offload_compat": {
        "text_encoder": {"route": "diffusers_group_offload", "offload_type": "block_level"},
        "transformer": {"route": "diffusers_group_offload", "offload_type": "block_level"},
    },
}


def effective_preset(requested: str) -> str:
    """The preset that a name stands for; ValueError for one that there is not."""
    name = requested.strip().lower()
    if name in ("", "auto"):
        return "one_shot_fast"
    if name not in DDO_PRESETS:
        raise ValueError(f"there is no preset {requested!r}; there are auto, {', '.join(DDO_PRESETS)}")
    return name


resolve_dynamic_offload_preset = effective_preset


def component_policy(preset: str, component: str) -> dict[str, Any]:
    """What a preset says of a component; empty if nothing."""
    return dict(_COMPONENTS.get(preset, {}).get(component, {}))
