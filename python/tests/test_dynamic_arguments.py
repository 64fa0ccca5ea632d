"""What `enable_offload` is given: wrong types and values are refused by name, on every route, before anything changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dynamic_models import DEVICE, plain, untouched

from weightstream import dynamic_offload as ddo

WRONG: dict[str, tuple[Any, ...]] = {
    "preset": (None, 5),
    "component": (5,),
    "settings": (5,),
    "config": ({},),
    "environ": (5,),
    "record_event": (5,),
    "use_environment": ("no",),
    "apply_hook": ("no",),
    "low_cpu_mem_usage": ("no",),
    "running_on_wsl": ("no",),
    "group_offload": ("no",),
    "dynamic_offload": ("no", 1),
    "use_stream": ("no",),
    "offload_type": ("leaf", 5),
    "num_blocks_per_group": (0, -1, 1.5, "2", True),
    "build_profile": ("false", 2),
    "pin_cpu_memory": ("false", None),
    "verbose": ("no",),
    "show_profile": ("no",),
    "resident_module_budget_gb": ("1", None),
    "offload_device": ("disk", 5, "cuda:0"),
    "target_module_classes": ("Linear", (5,)),
    "skip_modules_pattern": (5, (5,)),
    "always_resident_modules_pattern": (5,),
}


@pytest.mark.parametrize("route", ["dynamic_offload", "linear_convolution", "diffusers_group_offload", "none"])
@pytest.mark.parametrize("name, value", [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_argument_is_refused_by_its_name(name: str, value: Any, route: str) -> None:
    model = plain()
    arguments: dict[str, Any] = {"execution_device": DEVICE, "environ": {}, "profile_name": "w", name: value}
    with pytest.raises((TypeError, ValueError), match=name if name != "offload_device" else "offloaded to the CPU"):
        ddo.enable_offload(model, route=route, **arguments)
    assert untouched(model)


def test_patterns_may_be_one_text_from_settings_too() -> None:
    settings = ddo.load_dynamic_offload_settings_from_env(
        environ={}, skip_modules_pattern="head.*", always_resident_modules_pattern="proj.*"
    )
    assert settings.config.skip_modules_pattern == ("head.*",)
    assert settings.config.always_resident_modules_pattern == ("proj.*",)


def test_what_is_no_module_is_not_removed_from() -> None:
    with pytest.raises(TypeError, match="NoneType"):
        ddo.remove_dynamic_offload(None)  # type: ignore[arg-type]


def test_a_policys_group_of_no_blocks_is_refused() -> None:
    pytest.importorskip("diffusers")
    model = plain()
    environ = {
        "DDO_MODEL_ROUTE": "group",
        "DDO_MODEL_OFFLOAD_TYPE": "block_level",
        "DDO_MODEL_NUM_BLOCKS_PER_GROUP": "0",
    }
    with pytest.raises(ValueError, match="num_blocks_per_group=0"):
        ddo.enable_offload(model, execution_device=DEVICE, environ=environ)
    assert untouched(model)


def test_a_journal_is_switched_by_a_truth_value(tmp_path: Path) -> None:
    result = ddo.enable_offload(plain(), execution_device=DEVICE, environ={})
    with pytest.raises(TypeError, match="enabled"):
        result.metrics_journal(tmp_path / "journal", enabled="no")  # type: ignore[arg-type]
    ddo.remove_dynamic_offload(result.module)
