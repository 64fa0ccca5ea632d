"""Offloading by DDO's functions, under their names: a program of theirs changes the line that imports them.

from weightstream.dynamic_offload import enable_offload

offload = enable_offload(model, preset="auto", profile_name="my-workload", build_profile=calibrate)
with offload.profile_run():
    output = pipeline(**inputs)
"""

from __future__ import annotations

from .config import DynamicOffloadConfig
from .enabling import enable_offload, enable_pipeline_offload
from .loading import from_pretrained_with_dynamic_offload
from .metrics import DYNAMIC_OFFLOAD_METRICS_SCHEMA_VERSION, DynamicOffloadMetrics, DynamicOffloadMetricsJournal
from .presets import DDO_PRESETS, resolve_dynamic_offload_preset
from .profiles import (
    DYNAMIC_OFFLOAD_PROFILE_SCHEMA_VERSION,
    DynamicOffloadProfileSession,
    dynamic_offload_profile_key,
    dynamic_offload_profile_path,
    get_dynamic_offload_profile_capacity,
    get_dynamic_offload_profile_dir,
    get_dynamic_offload_profile_recommendation,
    load_dynamic_offload_profile,
    normalize_dynamic_offload_profile_context,
    record_dynamic_offload_profile,
)
from .results import DynamicOffloadApplyResult, DynamicOffloadLoadResult
from .settings import DynamicOffloadSettings, load_dynamic_offload_settings_from_env
from .state import get_dynamic_offload_state, remove_dynamic_offload

__all__ = [
    "DDO_PRESETS",
    "DYNAMIC_OFFLOAD_METRICS_SCHEMA_VERSION",
    "DYNAMIC_OFFLOAD_PROFILE_SCHEMA_VERSION",
    "DynamicOffloadApplyResult",
    "DynamicOffloadConfig",
    "DynamicOffloadLoadResult",
    "DynamicOffloadMetrics",
    "DynamicOffloadMetricsJournal",
    "DynamicOffloadProfileSession",
    "DynamicOffloadSettings",
    "dynamic_offload_profile_key",
    "dynamic_offload_profile_path",
    "enable_offload",
    "enable_pipeline_offload",
    "from_pretrained_with_dynamic_offload",
    "get_dynamic_offload_profile_capacity",
    "get_dynamic_offload_profile_dir",
    "get_dynamic_offload_profile_recommendation",
    "get_dynamic_offload_state",
    "load_dynamic_offload_profile",
    "load_dynamic_offload_settings_from_env",
    "normalize_dynamic_offload_profile_context",
    "record_dynamic_offload_profile",
    "remove_dynamic_offload",
    "resolve_dynamic_offload_preset",
]
