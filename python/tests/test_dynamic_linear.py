"""The dynamic route: every leaf is a unit, bits are the resident model's, budgets and pins are what was said."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
import safetensors.torch
import torch
from dynamic_models import DEVICE, TOKENS, Plain, plain, resident, same, untouched
from torch import nn

from weightstream import dynamic_offload as ddo
from weightstream.dynamic_offload.config import DynamicOffloadConfig
from weightstream.dynamic_offload.linear import GIB, pin_budget
from weightstream.dynamic_offload.selecting import select_pinned


def enable(model: nn.Module, **arguments: Any) -> ddo.DynamicOffloadApplyResult:
    options = {"execution_device": DEVICE, "environ": {}, "small_tensor_threshold_bytes": 0, "route": "dynamic_offload"}
    return ddo.enable_offload(model, **{**options, **arguments})


def placement(result: ddo.DynamicOffloadApplyResult) -> dict[str, int]:
    return result.metrics_snapshot().as_dict()["runtime"]["bytes_by_placement"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_leaves_without_towers_stream_with_the_same_bits(dtype: torch.dtype) -> None:
    model = plain(dtype=dtype)
    expected = resident(model, TOKENS)
    result = enable(model)
    assert result.event_payload["units"] == 4, "the subclass's own forward counts too"
    assert same(model, expected)
    runtime = result.metrics_snapshot().as_dict()["runtime"]
    assert runtime["bytes_by_placement"]["resident"] == 0 and runtime["copy_runtime"]["linear_parameter"]["calls"] > 0
    ddo.remove_dynamic_offload(model)
    assert untouched(model) and same(model, expected)


def test_what_is_no_leaf_is_on_the_device() -> None:
    model = plain()
    result = enable(model)
    base = sum(p.nbytes for part in (model.norm, model.conv) for p in part.parameters())
    assert base <= placement(result)["base"] <= base + 3 * 4096
    ddo.remove_dynamic_offload(model)


def test_classes_patterns_and_small_leaves_decide_what_streams() -> None:
    def units(**arguments: Any) -> tuple[int, list[str]]:
        model = plain()
        expected = resident(model, TOKENS)
        result = enable(model, **arguments)
        assert same(model, expected)
        ddo.remove_dynamic_offload(model)
        return result.event_payload["units"], result.event_payload["placed_leaves"]

    assert units(always_resident_modules_pattern="last") == (3, ["last"])
    assert units(skip_modules_pattern=("up", "table")) == (2, ["table", "up"])
    assert units(small_tensor_threshold_bytes=200_000) == (1, ["table", "up", "last"])
    config = DynamicOffloadConfig(
        execution_device=DEVICE, execution_mode="linear_runtime", target_module_classes=(nn.Embedding,)
    )
    model = plain()
    assert enable(model, config=config).event_payload["units"] == 1
    ddo.remove_dynamic_offload(model)
    assert units(skip_modules_pattern=(".",))[0] == 0, "nothing streams, and it runs"


@pytest.mark.parametrize("pages", [0, 40, 100, 10_000])
def test_a_resident_budget_counts_beside_base_and_ring(pages: int) -> None:
    model = plain()
    expected = resident(model, TOKENS)
    result = enable(model, resident_module_budget_gb=pages * 4096 / GIB)
    assert same(model, expected)
    placed = placement(result)
    assert placed["resident"] <= pages * 4096 and (pages == 0) == (placed["resident"] == 0)
    assert placed["base"] + placed["transit"] + placed["resident"] <= 3 << 20
    ddo.remove_dynamic_offload(model)


def test_tied_weights_and_repeated_layers() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(300, 64)
            self.layer = nn.Linear(64, 64)
            self.again = self.layer
            self.head = nn.Linear(64, 300, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.again(self.layer(self.table(tokens))))

    torch.manual_seed(0)
    model = Tied().eval()
    expected = resident(model, TOKENS)
    enable(model)
    assert same(model, expected)
    ddo.remove_dynamic_offload(model)
    assert same(model, expected) and model.head.weight is model.table.weight


def test_two_checkpoints_of_one_class_share_nothing() -> None:
    first, second = plain(0), plain(1)
    outputs = [resident(model, TOKENS) for model in (first, second)]
    for model in (first, second):
        enable(model)
    assert same(first, outputs[0]) and same(second, outputs[1]) and not torch.equal(*outputs)
    for model in (first, second):
        ddo.remove_dynamic_offload(model)


def test_pins_are_at_most_the_least_of_all_limits() -> None:
    def budget(**fields: Any) -> tuple[int, str]:
        config = DynamicOffloadConfig(**{"pin_cpu_memory": True, **fields})
        found = pin_budget(config, 10 * GIB)
        return found["budget_bytes"], found["decided_by"]

    assert budget() == (10 * GIB, "candidate")
    assert budget(pin_cpu_memory=False) == (0, "pin_cpu_memory")
    assert budget(pin_weight_budget_gb=4) == (4 * GIB, "pin_weight_budget_gb")
    assert budget(pin_weight_budget_gb=40, pin_weight_budget_ratio=0.5) == (5 * GIB, "pin_weight_budget_ratio")
    assert budget(max_pin_weight_budget_gb=3, pin_weight_budget_ratio=0.5) == (3 * GIB, "max_pin_weight_budget_gb")
    assert budget(available_system_ram_gb=8, system_ram_headroom_gb=6) == (2 * GIB, "system_ram")
    assert budget(available_system_ram_gb=5, system_ram_headroom_gb=6) == (0, "system_ram")


def test_which_leaves_are_pinned() -> None:
    sizes = [4, 4, 4, 4, 1, 8, 4, 4]
    assert select_pinned(sizes, 13, "first") == {0, 1, 2, 4}
    assert select_pinned(sizes, 13, "largest") == {5, 0, 4}
    assert select_pinned(sizes, 16, "spread") == {2, 4, 6, 7}
    assert select_pinned([1] * 20, 5, "spread") == {3, 7, 11, 15, 19}, "every fourth"
    random = Random(0)
    for _ in range(300):
        sizes = [random.randrange(1, 50) for _ in range(random.randrange(1, 40))]
        budget = random.randrange(sum(sizes) + 2)
        for how in ("first", "largest", "spread"):
            chosen = select_pinned(sizes, budget, how)
            left = budget - sum(sizes[number] for number in chosen)
            rest = [size for number, size in enumerate(sizes) if number not in chosen]
            assert left >= 0 and all(size > left for size in rest), "as much as fits"


@pytest.mark.parametrize(("how", "chosen"), [("first", ["table", "up"]), ("largest", ["middle"])])
def test_only_the_selected_leaves_are_pinned(how: str, chosen: list[str]) -> None:
    # table 150 KiB, up and last 130, middle 1026.
    budget = {"first": 300, "largest": 1100}[how] / (1 << 20)
    model = plain()
    expected = resident(model, TOKENS)
    result = enable(
        model, pin_cpu_memory=True, pin_weight_budget_gb=budget, pin_weight_selection=how, pin_cpu_workers=2
    )
    pinning = result.event_payload["pinning"]
    assert pinning["decided_by"] == "pin_weight_budget_gb" and pinning["selection"] == chosen
    assert same(model, expected)
    assert 0 < result.hook.report()["host"]["registered_bytes"] <= budget * GIB
    ddo.remove_dynamic_offload(model)


def test_files_are_shown_and_not_read_where_that_is_asked(tmp_path: Any) -> None:
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(plain().state_dict(), file)

    class Loader(Plain):
        @classmethod
        def from_pretrained(cls, path: Any, **options: Any) -> Plain:
            model = plain(seed=1)
            tensors = safetensors.torch.load_file(path)
            model.load_state_dict(tensors, assign=True)
            return model.eval().requires_grad_(False)

    expected = resident(plain(), TOKENS)
    for backend in ("mmap", ""):
        config = DynamicOffloadConfig(execution_device=DEVICE, load_safetensors_backend=backend)
        loaded = ddo.from_pretrained_with_dynamic_offload(
            file, model_loader=Loader, dynamic_offload_config=config, apply_dynamic=True
        )
        assert same(loaded.module, expected)
        assert bool(loaded.hook.report()["in_files"]) == (backend == "mmap")
        ddo.remove_dynamic_offload(loaded.module)


def test_reports_go_to_the_log_where_that_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="weightstream.dynamic_offload")
    for asked in (False, True):
        caplog.clear()
        result = enable(plain(), verbose=asked, show_profile=asked)
        with result.profile_run():
            pass
        text = caplog.text
        assert ("set up in" in text, "route: dynamic_offload" in text) == (asked, asked)
        ddo.remove_dynamic_offload(result.module)


def test_pins_of_the_loader_count_first_and_their_excess_is_told() -> None:
    config = DynamicOffloadConfig(pin_cpu_memory=True, pin_weight_budget_gb=4)
    found = pin_budget(config, 10 * GIB, 3 * GIB)
    assert (found["budget_bytes"], found["existing_bytes"], found["over_budget_bytes"]) == (4 * GIB, 3 * GIB, 0)
    assert pin_budget(config, 10 * GIB, 7 * GIB)["over_budget_bytes"] == 3 * GIB


@pytest.mark.parametrize("ram", [1.0, 1000.0])
def test_short_memory_pins_nothing_and_runs(ram: float) -> None:
    model = plain()
    expected = resident(model, TOKENS)
    result = enable(model, pin_cpu_memory=True, available_system_ram_gb=ram)
    assert same(model, expected)
    assert (result.event_payload["pinning"]["budget_bytes"] == 0) == (ram == 1.0)
    locked = result.hook.report()["host"]["registered_bytes"]
    assert (locked == 0) == (ram == 1.0)
    ddo.remove_dynamic_offload(model)


def test_a_report_is_json_detached_and_holds_no_tensor() -> None:
    model = plain()
    result = enable(model)
    snapshot = result.metrics_snapshot()
    first = snapshot.as_dict()
    assert first["schema_version"] == 1 and json.loads(json.dumps(first)) == first
    resident(model, TOKENS)
    assert snapshot.as_dict() == first, "it does not follow the model"
    first["runtime"].clear()
    assert snapshot.as_dict()["runtime"], "nor the caller"
    with pytest.raises(TypeError):
        snapshot.runtime["x"] = 1  # type: ignore[index]
    assert "route: dynamic_offload" in snapshot.format_profile()
    with pytest.raises(ValueError):
        result.metrics_snapshot(collect_completed=True)
    ddo.remove_dynamic_offload(model)
    assert result.metrics_snapshot().as_dict()["runtime"]["patched_module_count"] == 0


def test_loading_and_offloading_in_one_call(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDO_PROFILE_DIR", str(tmp_path))

    class Loader(Plain):
        @classmethod
        def from_pretrained(cls, path: str, **options: Any) -> Plain:
            assert path == "a/model" and options == {"dtype": torch.float32}
            return plain()

    expected = resident(plain(), TOKENS)
    config = ddo.load_dynamic_offload_settings_from_env(environ={}, execution_device=DEVICE).config
    for calibrate in (True, False):
        loaded = ddo.from_pretrained_with_dynamic_offload(
            "a/model",
            model_loader=Loader,
            dynamic_offload_config=config,
            apply_dynamic=True,
            profile_name="my-workload",
            build_profile=calibrate,
            dtype=torch.float32,
        )
        with loaded.profile_run() as report, torch.inference_mode():
            assert torch.equal(loaded.module(TOKENS), expected)
        assert report["status"] == ("saved" if calibrate else "applied")
        assert loaded.metrics_snapshot().as_dict()["route"] == "dynamic_offload"
    later = ddo.from_pretrained_with_dynamic_offload("a/model", model_loader=Loader, dtype=torch.float32)
    assert untouched(later.module) and later.metrics_snapshot().route == "loaded"
    with later.profile_run() as report:
        assert report is None
    for options in ({"profile_name": "w"}, {"build_profile": True}):
        with pytest.raises(ValueError, match="apply_dynamic=False"):
            ddo.from_pretrained_with_dynamic_offload("a/model", model_loader=Loader, **options)
