"""The dynamic route: every supported leaf is a unit of the engine, which streams it to its own constant address.

Memory beside the base (what is no leaf) and a transit ring of the largest leaf is the resident budget.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..attaching import Prepared
from ..attachment import Attachment
from ..checks import check_model
from ..devices import DeviceArgument, HostDevice, open_target
from ..errors import DeviceError
from ..ownership import Owned
from ..spans import tensor_bytes
from ..towers import find_towers
from .calibration import GIB
from .config import DynamicOffloadConfig
from .routes import is_sdnq_layer
from .selecting import select_pinned

__all__ = ["Dynamic", "device_argument", "Leaves", "compute_device", "leaves", "pin_budget", "stream_leaves"]

_MOST = (1 << 63) - 1
"""Bytes: more is no size of a device."""


@dataclass
class Dynamic:
    """A module on the dynamic route."""

    attachment: Attachment
    units: list[str]
    placed: list[str]
    """Leaves that a pattern or their size keeps on the device."""
    resident_budget: int
    transit: int
    base: int
    pinning: dict[str, Any]

    def setup(self) -> dict[str, Any]:
        """What set-up did, as JSON has it."""
        return {
            "units": len(self.units),
            "placed_leaves": self.placed,
            "base_bytes": self.base,
            "transit_ring_bytes": self.transit,
            "resident_module_budget_bytes": self.resident_budget,
            "pinning": self.pinning,
        }

    def runtime(self) -> dict[str, Any]:
        """What has run."""
        report = self.attachment.report()
        taken = report["engine"]["page_bytes_in_use"] if self.attachment.attached else 0
        return {
            "module_count": len(self.units) + len(self.placed),
            "patched_module_count": len(self.units) if self.attachment.attached else 0,
            "total_gb": report["model_bytes"] / GIB,
            "bytes_by_placement": {
                "base": self.base,
                "transit": min(self.transit, max(0, taken - self.base)),
                "resident": max(0, taken - self.base - self.transit),
            },
            "copy_runtime": {"linear_parameter": _copies(self.attachment.stats())},
            "notes": list(report["notes"]),
        }


def _copies(stats: dict[str, Any]) -> dict[str, Any]:
    return {
        "calls": stats.get("copies", 0),
        "host_seconds": stats.get("host_nanoseconds", 0) / 1e9,
        "gb": stats.get("copied_bytes", 0) / GIB,
    }


def device_argument(device: Any) -> DeviceArgument:
    """An execution device as `attach` takes it; DeviceError for one that nothing streams to."""
    if isinstance(device, HostDevice) or (isinstance(device, str) and device in ("host", "auto")):
        return device
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError):
        raise DeviceError(f"execution_device={device!r} is no device") from None
    if named.type != "cuda":
        raise DeviceError(f'execution_device={device!r}: weights stream to CUDA devices, and to the emulator, "host"')
    return str(named)


def compute_device(device: Any) -> torch.device:
    """Where modules compute on an execution device: the CPU for the emulator."""
    argument = device_argument(device)
    if argument == "auto":
        argument = "cuda" if torch.cuda.is_available() else "host"
    if not isinstance(argument, str) or argument == "host":
        return torch.device("cpu")
    named = torch.device(argument)
    if named.index is None:
        named = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return named


@dataclass
class Leaves:
    """The leaves of a module that may stream."""

    streamed: list[tuple[str, nn.Module]]
    kept: list[tuple[str, nn.Module]]
    """Those that a pattern keeps on the device."""
    small: list[str]
    """Those that stay there because they are small or skipped."""


def leaves(module: nn.Module, config: DynamicOffloadConfig) -> Leaves:
    """Finds them."""
    quantized = config.execution_mode == "sdnq_runtime"
    skip = [re.compile(pattern) for pattern in config.skip_modules_pattern]
    keep = [re.compile(pattern) for pattern in config.always_resident_modules_pattern]
    found = Leaves([], [], [])
    inside: set[int] = set()
    for name, leaf in module.named_modules():
        # Beside layers quantized by SDNQ the dense ones are few: they stay on the device.
        wanted = is_sdnq_layer(leaf) if quantized else isinstance(leaf, config.target_module_classes)
        if id(leaf) in inside or not wanted:
            continue
        inside.update(id(part) for part in leaf.modules())
        own = tensor_bytes(leaf)
        if own <= config.small_tensor_threshold_bytes or not name or any(p.search(name) for p in skip):
            found.small.append(name or type(leaf).__name__)
        elif any(pattern.search(name) for pattern in keep):
            found.kept.append((name, leaf))
        else:
            found.streamed.append((name, leaf))
    return found


def pinned_bytes(found: list[tuple[str, nn.Module]]) -> int:
    """What of the leaves is page-locked already, by whoever loaded them. It stays so."""
    if not torch.cuda.is_available():
        return 0
    parameters = {id(p): p for _, leaf in found for p in leaf.parameters()}
    return sum(p.nbytes for p in parameters.values() if p.is_pinned())


def pin_budget(config: DynamicOffloadConfig, candidates: int, existing: int = 0) -> dict[str, Any]:
    """How much of the weights' memory is page-locked, in bytes: the least of all limits that are set, and nothing where memory
    is short. What is locked already counts first; what of it exceeds the limits is told and stays."""
    limits = {"candidate": candidates}
    if config.pin_weight_budget_gb > 0:
        limits["pin_weight_budget_gb"] = int(config.pin_weight_budget_gb * GIB)
    if config.pin_weight_budget_ratio > 0:
        limits["pin_weight_budget_ratio"] = int(config.pin_weight_budget_ratio * candidates)
    if config.max_pin_weight_budget_gb > 0:
        limits["max_pin_weight_budget_gb"] = int(config.max_pin_weight_budget_gb * GIB)
    if config.available_system_ram_gb > 0:
        room = config.available_system_ram_gb - config.system_ram_headroom_gb
        limits["system_ram"] = max(0, int(room * GIB))
    if not config.pin_cpu_memory:
        limits["pin_cpu_memory"] = 0
    decided = min(limits, key=lambda name: limits[name])
    budget = limits[decided]
    return {
        "candidate_bytes": candidates,
        "budget_bytes": budget,
        "decided_by": decided,
        "existing_bytes": existing,
        "over_budget_bytes": max(0, existing - budget),
    }


def stream_leaves(module: nn.Module, config: DynamicOffloadConfig, resident_gb: float, profiled: bool) -> Dynamic:
    """Puts a module on the dynamic route, all of it or nothing.

    `profiled`: the resident budget is measured, or to be measured, without the leaves that a pattern keeps on the device: these
    count as residents then, and stream where there is no room for them.
    """
    found = leaves(module, config)
    streamed = list(found.streamed)
    residents = int(min(resident_gb * GIB, _MOST))
    kept = sum(tensor_bytes(leaf) for _, leaf in found.kept)
    if profiled and kept > residents:
        streamed, found.kept, kept = streamed + found.kept, [], 0
    beside = residents - kept if profiled else residents
    pinning = pin_budget(config, sum(tensor_bytes(leaf) for _, leaf in streamed), pinned_bytes(streamed))
    room: dict[str, int] = {}

    def budget(base: int, largest: int, page: int, total: int) -> int:
        transit = -(-largest // page) * page
        room.update(base=base, transit=transit)
        # Beyond the whole model a budget means nothing.
        return max(1, min(base + transit + beside, -(-total // page) * page + page))

    limit = max(0, pinning["budget_bytes"] - pinning["existing_bytes"])
    everything = pinning["decided_by"] == "candidate"
    check_model(module)
    target = open_target(device_argument(config.execution_device))
    towers = find_towers(module, [[leaf for _, leaf in streamed]] if streamed else [])
    prepared = Prepared(
        module,
        target,
        towers,
        budget,  # type: ignore[arg-type]  # see attaching._plan
        None,
        None if everything else limit,
        # The default leaves it to us.
        threads=int(config.pin_cpu_workers) if config.pin_cpu_workers > 1 else None,
    )
    chosen = set(range(len(streamed)))
    if not everything:
        chosen = select_pinned([tensor_bytes(leaf) for _, leaf in streamed], limit, config.pin_weight_selection)
    pinning["selection"] = [streamed[number][0] for number in sorted(chosen)] if not everything else "all"
    attachment = prepared.start(_locks(prepared, [leaf for _, leaf in streamed], chosen))
    placed = [*found.small, *(name for name, _ in found.kept)]
    return Dynamic(
        attachment, [name for name, _ in streamed], placed, residents, room["transit"], room["base"], pinning
    )


def _locks(prepared: Prepared, streamed: list[nn.Module], chosen: set[int]) -> Callable[[Owned], bool]:
    """Whether a tensor is page-locked: of the streamed ones those of the chosen leaves, and of the rest all that may be."""
    numbers = {id(leaf): number for number, leaf in enumerate(streamed)}
    by_block = {block.index: numbers.get(id(block.module)) for block in prepared.ownership.blocks}

    def lock(owned: Owned) -> bool:
        return owned.block is None or by_block.get(owned.block) in chosen

    return lock
