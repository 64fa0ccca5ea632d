"""Profiles of workloads: named ones, and the functions of DDO's older interface, which find a profile by a context.

A profile is one record of the store in `crates/profile-store`: the file's name is the hash of the identity, writers merge
under a lock, and a damaged file is set aside and reads as missing.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Union

import torch

from .. import _native
from ..errors import ProfileError

__all__ = [
    "DYNAMIC_OFFLOAD_PROFILE_SCHEMA_VERSION",
    "DynamicOffloadProfileSession",
    "dynamic_offload_profile_key",
    "dynamic_offload_profile_path",
    "get_dynamic_offload_profile_capacity",
    "get_dynamic_offload_profile_dir",
    "get_dynamic_offload_profile_recommendation",
    "load_dynamic_offload_profile",
    "normalize_dynamic_offload_profile_context",
    "record_dynamic_offload_profile",
]

DYNAMIC_OFFLOAD_PROFILE_SCHEMA_VERSION = 1
"""The version of the files."""
OBSERVATIONS = 20
"""How many observations a profile keeps: the last ones."""

Folder = Union[str, os.PathLike, None]
"""A folder of profiles; None for the one that `DDO_PROFILE_DIR` and the home folder say now."""


def get_dynamic_offload_profile_dir(profile_dir: Folder = None) -> Path:
    """The folder of profiles: the one given, `DDO_PROFILE_DIR` as it is now, or `.ddo/profiles` in the home folder."""
    return Path(profile_dir).expanduser() if profile_dir is not None else Path(_native.profile_folder())


def normalize_dynamic_offload_profile_context(context: Mapping[str, Any]) -> dict[str, Any]:
    """The context as JSON has it: types, devices and paths as texts, members by name."""
    if not isinstance(context, Mapping) or not context:
        raise ProfileError("a profile's context is a mapping that is not empty")
    return {str(key): _plain(context[key]) for key in sorted(context, key=str)}


def _plain(value: Any) -> Any:
    """A value that JSON has."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=str)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (torch.dtype, torch.device, os.PathLike)):
        return str(value)
    if isinstance(value, type):
        return value.__qualname__
    raise ProfileError(f"a {type(value).__name__} cannot be kept in a profile")


def _identity(context: Mapping[str, Any]) -> str:
    return json.dumps(normalize_dynamic_offload_profile_context(context))


def dynamic_offload_profile_key(context: Mapping[str, Any]) -> str:
    """The hash by which a context's profile is found."""
    return _native.profile_key(_identity(context))


def dynamic_offload_profile_path(context: Mapping[str, Any], profile_dir: Folder = None) -> Path:
    """The file of a context's profile, whether or not it is there."""
    return get_dynamic_offload_profile_dir(profile_dir) / f"{dynamic_offload_profile_key(context)}.json"


def load_dynamic_offload_profile(context: Mapping[str, Any], profile_dir: Folder = None) -> dict[str, Any] | None:
    """The profile of a context; None, with a warning that says why, if there is none that can be used."""
    text, notices = _native.profile_load(str(get_dynamic_offload_profile_dir(profile_dir)), _identity(context))
    _warn(notices)
    return None if text is None else _profile(json.loads(text))


def _warn(notices: list[str]) -> None:
    for notice in notices:
        warnings.warn(f"a workload's profile: {notice}", RuntimeWarning, stacklevel=3)


def _profile(record: dict[str, Any]) -> dict[str, Any]:
    """A record of the store as DDO's older interface shows a profile."""
    entries = record["entries"].values()
    observations = [entry for entry in entries if entry["kind"] == "observation"]
    observations.sort(key=lambda entry: (entry["written_at"], entry.get("sequence", 0)))
    capacity = {name.partition("/")[2]: e for name, e in record["entries"].items() if e["kind"] == "capacity"}
    recommendation = record["entries"].get("recommendation")
    return {
        "schema_version": record["schema_version"],
        "profile_key": record["key"],
        "updated_at": record.get("updated_at"),
        "context": record["identity"],
        "capacity_limits": {name: _without(entry, "kind") for name, entry in capacity.items()},
        "observations": [_without(entry, "kind") for entry in observations],
        "recommendation": None if recommendation is None else _without(recommendation, "kind"),
    }


def _without(entry: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in names}


def record_dynamic_offload_profile(
    context: Mapping[str, Any],
    observation: Mapping[str, Any],
    profile_dir: Folder = None,
    recommendation: Mapping[str, Any] | None = None,
) -> Path:
    """Adds an observation to a context's profile, and replaces its recommendation if one is given. Returns the file.

    An observation's `capacity` (or `capacity_limits`), a mapping of metrics to numbers, widens what is known to succeed, or
    to fail where its `status` is "failed".
    """
    seen = _plain(dict(observation))
    advice = None if recommendation is None else _plain(dict(recommendation))

    def change(record: dict[str, Any]) -> dict[str, Any]:
        entries = record["entries"]
        stamp = _now()
        number = 1 + max((e.get("sequence", 0) for e in entries.values() if e["kind"] == "observation"), default=0)
        name = f"observation/{stamp}-{os.getpid()}-{time.monotonic_ns()}"
        put: dict[str, Any] = {name: {**seen, "kind": "observation", "written_at": stamp, "sequence": number}}
        if advice is not None:
            put["recommendation"] = {**advice, "kind": "recommendation", "written_at": stamp}
        put.update(_capacity(entries, seen))
        known = [(e["written_at"], e.get("sequence", 0), n) for n, e in entries.items() if e["kind"] == "observation"]
        for _, _, old in sorted(known)[: max(0, len(known) + 1 - OBSERVATIONS)]:
            put[old] = None
        return put

    folder = get_dynamic_offload_profile_dir(profile_dir)
    update(folder, context, change)
    return dynamic_offload_profile_path(context, folder)


def update(folder: Path, context: Mapping[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Changes a record under the folder's lock: `change` answers the entries to put, None for those to remove."""
    _, notices = _native.profile_update(
        str(folder), _identity(context), lambda text: json.dumps(change(json.loads(text)), allow_nan=False)
    )
    _warn(notices)


def _capacity(entries: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
    """The widened limits of the metrics in an observation."""
    metrics = seen.get("capacity", seen.get("capacity_limits"))
    failed = seen.get("status") in ("failed", "failure", "oom")
    limits = {}
    for metric, value in (metrics or {}).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ProfileError(f"the capacity {metric!r} is {value!r}, no number")
        old = entries.get(f"capacity/{metric}", {"kind": "capacity"})
        which, widest = ("min_failure", min) if failed else ("max_success", max)
        limits[f"capacity/{metric}"] = {**old, which: widest(value, old.get(which, value))}
    return limits


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


def get_dynamic_offload_profile_capacity(profile: Mapping[str, Any], metric: str) -> dict[str, float] | None:
    """What is known of a metric: `max_success`, `min_failure`, or both; None if nothing is."""
    limits = (profile.get("capacity_limits") or {}).get(metric)
    if not isinstance(limits, Mapping):
        return None
    known = {name: float(limits[name]) for name in ("max_success", "min_failure") if name in limits}
    return known or None


def get_dynamic_offload_profile_recommendation(profile: Mapping[str, Any]) -> dict[str, Any] | None:
    """The recommendation of a profile; None if it has none."""
    advice = profile.get("recommendation")
    return dict(advice) if isinstance(advice, Mapping) else None


@dataclass
class DynamicOffloadProfileSession:
    """DDO's older interface: one profile for what was executed, one for what the machine can hold."""

    execution_context: Mapping[str, Any]
    capacity_context: Mapping[str, Any]
    profile_dir: Folder = None
    execution_profile: dict[str, Any] | None = field(init=False)
    capacity_profile: dict[str, Any] | None = field(init=False)

    def __post_init__(self) -> None:
        """Loads both profiles."""
        self.execution_profile = load_dynamic_offload_profile(self.execution_context, self.profile_dir)
        self.capacity_profile = load_dynamic_offload_profile(self.capacity_context, self.profile_dir)

    def apply_settings(self, settings: Any, *, allow_recommendation: bool = True) -> Any:
        """The settings with the recommended resident budget, unless they have one of their own."""
        from .settings import with_config

        advice = get_dynamic_offload_profile_recommendation(self.execution_profile or {}) or {}
        budget = advice.get("resident_module_budget_gb")
        if not allow_recommendation or budget is None or settings.config.resident_module_budget_gb > 0:
            return settings
        cap = settings.config.max_resident_module_budget_gb
        return with_config(settings, resident_module_budget_gb=min(budget, cap) if cap > 0 else budget)

    @staticmethod
    def recommend_resident_budget(total_vram_gb: float, peak_vram_gb: float, headroom_gb: float) -> float:
        """What is left of the device beside the measured peak and the headroom, in GiB; never below 0."""
        numbers = (total_vram_gb, peak_vram_gb, headroom_gb)
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError(f"total, peak and headroom are finite and not negative, not {numbers}")
        return max(0.0, total_vram_gb - peak_vram_gb - headroom_gb)

    def record_success(self, observation: Mapping[str, Any], recommendation: Mapping[str, Any] | None = None) -> Path:
        """Records a run that succeeded in both profiles. Returns the file of the execution's."""
        seen = {"status": "success", **observation}
        record_dynamic_offload_profile(self.capacity_context, seen, self.profile_dir)
        path = record_dynamic_offload_profile(self.execution_context, seen, self.profile_dir, recommendation)
        self.__post_init__()
        return path
