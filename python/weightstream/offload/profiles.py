"""The five memory profiles: what each sets, for `all` to be called with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["PROFILES", "profile_settings", "profile_type"]


class profile_type:  # noqa: N801, the name is mmgp's
    """The profiles by name. Their values are mmgp's numbers, which work as well."""

    HighRAM_HighVRAM = 1
    HighRAM_LowVRAM = 2
    LowRAM_HighVRAM = 3
    LowRAM_LowVRAM = 4
    VerylowRAM_LowVRAM = 5


PROFILES = {
    value: name for name, value in vars(profile_type).items() if not name.startswith("_") and isinstance(value, int)
}
"""The profiles' names by number."""

_BUDGETS: dict[int, dict[str, float]] = {
    1: {"transformer": 1200, "*": 3000},
    2: {"transformer": 1200, "*": 3000},
    3: {"transformer": 1200, "*": 3000},
    4: {"transformer": 1200, "*": 3000},
    5: {"transformer": 400, "*": 3000},
}
"""In MB. Profiles 1 and 3 fill what a workload leaves free once it was measured, and have the budgets of 2 and 4 until then."""
_PINNED: dict[int, Any] = {1: True, 2: True, 3: "transformer", 4: "transformer", 5: False}
_PRELOADING = (1, 3)
_ENCODERS = ("text_encoder", "text_encoder_2")
_LANGUAGE_MODELS = ("t5", "llama", "llm")
"""Parts of the names of Python modules that text encoders worth quantizing come from."""


def profile_settings(number: int, models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """What a profile sets for these models, as parameters of `all`."""
    settings: dict[str, Any] = {
        "pinnedMemory": _PINNED[number],
        "budgets": dict(_BUDGETS[number]),
        "quantizeTransformer": True,
        "asyncTransfers": True,
        "preloadExperts": False,
    }
    if number in _PRELOADING:
        settings["autoPreload"] = True
    if number >= 3:
        settings["extraModelsToQuantize"] = [
            name
            for name in _ENCODERS
            if name in models
            and any(part in type(models[name]).__module__.lower().rpartition(".")[2] for part in _LANGUAGE_MODELS)
        ]
    return settings
