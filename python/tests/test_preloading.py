"""What a workload leaves free is filled from its second step on, and given back before it is missed."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import lora_models
import pytest
import torch
from attach_models import run
from pipeline_models import Model, check, device, pipeline, set_up
from preloading_models import Allocated
from torch import nn

from weightstream import DeviceError, allocator, offload, preloading
from weightstream.offload.managed import OffloadObject

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloading, "MEASURED", {})


def engine(managed: OffloadObject, name: str = "transformer") -> dict[str, Any]:
    return managed.models[name].attachment.report()["engine"]


def native(managed: OffloadObject, name: str = "transformer") -> Any:
    return managed.models[name].attachment._runtime.target.native


def preloaded(managed: OffloadObject, name: str = "transformer") -> int:
    return managed.models[name].attachment._runtime.offloader.preloaded()


class Activations:
    """Takes device memory in a block's forward, as activations do; asks for what was preloaded if there is none left."""

    def __init__(self, managed: OffloadObject, model: nn.Module, size: int, block: int = 3) -> None:
        self.managed, self.size, self.freed = managed, size, []
        self.hook = model.blocks[block].register_forward_pre_hook(self.take)
        self.end = model.register_forward_hook(self.give)
        self.held: list[Any] = []

    def take(self, *_: object) -> None:
        device = native(self.managed)
        try:
            self.held.append(device.occupy(self.size))
        except DeviceError:
            self.freed.append(self.managed.release_preload(self.size - device.free_memory()))
            self.held.append(device.occupy(self.size))

    def give(self, *_: object) -> None:
        while self.held:
            self.held.pop().release()

    def remove(self) -> None:
        self.hook.remove()
        self.end.remove()


def test_the_second_step_keeps_more_and_the_bits_stay() -> None:
    models, references, x = pipeline("transformer")
    with set_up(models, budgets=0.4, autoPreload=True, device=device("4MiB")) as managed:
        check(models, references, x)
        first = engine(managed)
        assert (first["own_pages"] + first["ring_pages"]) * first["page_bytes"] <= 0.4 * MIB
        assert preloaded(managed) == 0
        check(models, references, x)
        copies = engine(managed)["stats"]["copies"]
        check(models, references, x)
        assert engine(managed)["stats"]["copies"] == copies, "the whole model fits"
        assert preloaded(managed) > 0
        uploaded = engine(managed)["stats"]["uploaded_bytes"]
        for _ in range(5):
            check(models, references, x)
        assert engine(managed)["stats"]["uploaded_bytes"] == uploaded, "and nothing moves any more"
    check(models, references, x)


def test_a_step_is_left_what_it_took_when_it_was_measured() -> None:
    models, references, x = pipeline("transformer")
    need = 700 << 10
    with set_up(models, budgets=0.4, autoPreload=True, device=device("1536KiB")) as managed:
        activations = Activations(managed, models["transformer"], need)
        for _ in range(4):
            check(models, references, x)
        assert activations.freed == [], "what was preloaded left room for the step"
        assert 0 < preloaded(managed) <= 1536 * 1024 - need - 0.4 * MIB
        assert engine(managed)["page_bytes_in_use"] + need <= 1536 * 1024
        assert next(iter(preloading.MEASURED.values())) == need
        activations.remove()
    check(models, references, x)


def test_a_larger_workload_gets_all_that_the_budget_leaves_and_a_smaller_one_its_room_back() -> None:
    models, references, x = pipeline("transformer")
    large = {"transformer": torch.randn(6, 128).bfloat16()}
    with set_up(models, budgets=0.4, autoPreload=True, device=device("1536KiB")) as managed:
        for _ in range(3):
            check(models, references, x)
        small = preloaded(managed)
        assert small > 0
        activations = Activations(managed, models["transformer"], 1 * MIB)
        check(models, references, large)
        assert preloaded(managed) == 0, "of an unknown workload nothing is known"
        check(models, references, large)
        check(models, references, large)
        assert preloaded(managed) < small and activations.freed == []
        activations.remove()
        for _ in range(6):
            check(models, references, x)
        assert preloaded(managed) == small
        assert len(preloading.MEASURED) == 2


def test_a_dictionary_keeps_what_was_measured_for_the_next_time() -> None:
    models, references, x = pipeline("transformer")
    measured: dict[str, int] = {}
    with set_up(models, budgets=0.4, autoPreload=measured, device=device("4MiB")):
        check(models, references, x)
    assert len(measured) == 1 and preloading.MEASURED == {}
    again = json.loads(json.dumps(measured))
    with set_up(models, budgets=0.4, autoPreload=again, device=device("4MiB")) as managed:
        check(models, references, x)
        assert preloaded(managed) > 0, "its first step was measured before"
    hostile = dict.fromkeys(measured, "many")
    with set_up(models, budgets=0.4, autoPreload=hostile, device=device("4MiB")) as managed:
        check(models, references, x)
        assert preloaded(managed) == 0 and hostile == measured, "measured anew"


def test_what_somebody_else_takes_is_given_back_before_the_next_step() -> None:
    models, references, x = pipeline("transformer")
    with set_up(models, budgets=0.4, autoPreload=True, device=device("1536KiB")) as managed:
        for _ in range(3):
            check(models, references, x)
        full = preloaded(managed)
        somebody = native(managed).occupy(native(managed).free_memory())
        check(models, references, x)
        less = preloaded(managed)
        assert less < full
        somebody.release()
        for _ in range(2):
            check(models, references, x)
        assert preloaded(managed) == full
        # More than is there cannot be had, and the budget itself is not given back.
        assert managed.release_preload() > 0
        assert preloaded(managed) == 0 and managed.release_preload() == 0
        check(models, references, x)


@pytest.mark.parametrize("block", [0, 3, 7])
@pytest.mark.parametrize("warm", [2, 4])
def test_memory_that_runs_out_in_a_step_is_given_back_in_it(block: int, warm: int) -> None:
    models, references, x = pipeline("transformer")
    with set_up(models, budgets=0.4, autoPreload=True, device=device("1536KiB")) as managed:
        for _ in range(warm):
            check(models, references, x)
        full = preloaded(managed)
        activations = Activations(managed, models["transformer"], 800 << 10, block)
        check(models, references, x)
        assert len(activations.freed) == 1 and activations.freed[0] > 0
        assert 0 < preloaded(managed) < full
        for _ in range(6):
            check(models, references, x)
        assert len(activations.freed) == 1, "it counts from then on"
        activations.remove()


def test_what_was_given_back_in_a_step_is_right_out_of_turn_too() -> None:
    models, references, x = pipeline("transformer")
    model, reference = models["transformer"], references["transformer"]
    with set_up(models, budgets=0.4, autoPreload=True, device=device("4MiB")) as managed, torch.no_grad():
        for _ in range(3):
            check(models, references, x)
        seen: list[torch.Tensor] = []

        def look(*_: object) -> None:
            assert managed.release_preload() > 0
            seen.extend(block.up(x["transformer"]) for block in model.blocks)

        hook = model.last.register_forward_pre_hook(look)
        check(models, references, x)
        hook.remove()
        for block, got in zip(reference.blocks, seen):
            assert torch.equal(got, block.up(x["transformer"]))


@pytest.mark.parametrize("order", ["eager", "lazy", "random"])
def test_an_allocation_that_would_fail_takes_what_was_preloaded(order: str) -> None:
    models, references, x = pipeline("transformer")
    allocator.serve_pressure()
    try:
        with set_up(models, budgets=0.4, autoPreload=True, device=device("1536KiB", order=order)) as managed:
            for _ in range(3):
                check(models, references, x)
            full = preloaded(managed)
            allocations = managed.models["transformer"].attachment._runtime.preloading.allocations
            memory, found = Allocated(allocations.number), []
            steps: list[bool] = []
            start = (
                models["transformer"]
                .blocks[2]
                .register_forward_pre_hook(lambda *_: found.append(memory.allocate(500 << 10)))
            )
            more = (
                models["transformer"]
                .blocks[5]
                .up.register_forward_pre_hook(lambda *_: found.append(memory.allocate(300 << 10)))
            )
            end = models["transformer"].register_forward_hook(lambda *_: steps.append(memory.free() is None))
            check(models, references, x)
            assert found == [True, True] and 0 < preloaded(managed) < full
            less = preloaded(managed)
            for _ in range(4):
                check(models, references, x)
            assert preloaded(managed) <= less and all(found), "it counts from then on"
            # What not even all of the preload can give is refused, and the step goes on.
            too_much = (
                models["transformer"]
                .blocks[6]
                .register_forward_pre_hook(lambda *_: found.append(memory.allocate(2 * MIB)))
            )
            check(models, references, x)
            assert found[-1] is False and preloaded(managed) == 0
            for hook in (start, more, end, too_much):
                hook.remove()
            assert allocations.report()[0] == 0
            check(models, references, x)
        assert memory.allocate(64 << 10), "there is nobody to ask, and memory enough"
        memory.free()
        assert memory.library.weightstream_allocate(64 << 10, 4711, None) is None, "no such device"
    finally:
        allocator.serve_pressure(on=False)


def test_models_that_take_turns_are_not_loaded_again() -> None:
    models, references, x = pipeline("transformer", "text_encoder", "vae")
    company = {"transformer": ["text_encoder"], "text_encoder": ["transformer"], "vae": "*"}
    with set_up(models, budgets=0.3, coTenantsMap=company, autoPreload=True, device=device("2MiB")) as managed:
        for _ in range(4):
            check(models, references, x)
        uploaded = {name: engine(managed, name)["stats"]["uploaded_bytes"] for name in models}
        for _ in range(4):
            check(models, references, x)
        assert {name: engine(managed, name)["stats"]["uploaded_bytes"] for name in models} == uploaded
        assert sorted(managed.loaded()) == ["text_encoder", "transformer", "vae"]
        assert preloaded(managed) > 0


def test_models_that_do_not_accept_each_other_have_the_device_in_turn() -> None:
    models, references, x = pipeline("transformer", "text_encoder")
    with set_up(models, budgets=0.3, coTenantsMap={}, autoPreload=True, device=device("1536KiB")) as managed:
        for _ in range(5):
            check(models, references, x)
        assert preloaded(managed, "transformer") > 0 and preloaded(managed, "text_encoder") > 0
        assert engine(managed, "text_encoder")["is_here"] and not engine(managed, "transformer")["is_here"]


def test_a_budget_that_is_changed_meanwhile_counts_from_then_on() -> None:
    models, references, x = pipeline("transformer")
    with set_up(models, budgets=0.4, autoPreload=True, device=device("1536KiB")) as managed:
        attachment = managed.models["transformer"].attachment
        for _ in range(3):
            check(models, references, x)
        budget, full = attachment.budget, preloaded(managed)
        assert full > 0
        for change in (100 << 10, -(150 << 10)):
            attachment.set_budget(budget + change)
            assert attachment.budget == budget + change and preloaded(managed) == 0
            for _ in range(2):
                check(models, references, x)
            assert attachment.budget == budget + change
            assert attachment.budget + preloaded(managed) == budget + full, "all of it is used as before"
            assert preloading.MEASURED and set(preloading.MEASURED.values()) == {0}, "that is no pressure"


def test_models_in_each_others_steps_keep_what_they_have() -> None:
    models, references, x = pipeline("transformer", "vae")
    with set_up(models, budgets=0.3, coTenantsMap={"vae": "*"}, autoPreload=True, device=device("1MiB")) as managed:
        for _ in range(3):
            check(models, references, x)
        inner: list[torch.Tensor] = []
        vae = models["vae"]
        wide = {"vae": torch.randn(5, 64).bfloat16()}
        hook = models["transformer"].blocks[2].register_forward_pre_hook(lambda *_: inner.append(vae(wide["vae"])))
        with torch.no_grad():
            expected = references["vae"](wide["vae"])
        check(models, references, x, "transformer")
        hook.remove()
        assert torch.equal(inner[0], expected)
        assert managed.loaded() == ["transformer", "vae"] or set(managed.loaded()) == {"transformer", "vae"}


def test_profiles_one_and_three_switch_it_on_and_what_cannot_have_it_does_not() -> None:
    models, references, x = pipeline("transformer", "text_encoder")
    settings = {"quantizeTransformer": False, "budgets": {"transformer": 0.4, "*": 0.2}, "device": device("4MiB")}

    def fills(managed: OffloadObject) -> dict[str, bool]:
        for _ in range(3):
            check(models, references, x)
        filled = {name: preloaded(managed, name) > 0 for name in models}
        managed.release()
        return filled

    for number in range(1, 6):
        expected = number in (1, 3)
        assert set(fills(offload.profile(models, number, 0, **settings)).values()) == {expected}, number
    assert set(fills(offload.profile(models, 1, 0, autoPreload=False, **settings)).values()) == {False}
    assert set(fills(offload.profile(models, 3, 0, asyncTransfers=False, **settings)).values()) == {False}
    with offload.all(models, autoPreload=True, compile=["text_encoder"], **settings) as managed:
        preloads = {name: one.attachment._runtime.preloading is not None for name, one in managed.models.items()}
        assert preloads == {"transformer": True, "text_encoder": False}


def test_nothing_is_kept_of_a_model_that_was_released() -> None:
    models, references, x = pipeline("transformer")
    for _ in range(3):
        with set_up(models, budgets=0.4, autoPreload=True, device=device("4MiB")) as managed:
            for _ in range(3):
                check(models, references, x)
            assert managed.models["transformer"].attachment.report()["survivors"] == []
        check(models, references, x)
    gc.collect()


def test_workloads_are_told_apart_by_what_a_method_is_given() -> None:
    one, other = torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int64)
    name = preloading.workload_of
    assert name("forward", (one,), {"b": [other, 3], "a": {"c": one}}) == (
        "forward(float32[2x3], a=c=float32[2x3], b=int64[2x4])"
    )
    assert name("forward", (one, 0.5), {}) == name("forward", (one, 0.7), {})
    assert name("forward", (one,), {}) != name("decode", (one,), {}) != name("decode", (other,), {})
    assert isinstance(Model(8, 1), nn.Module)


def test_adapters_keep_their_part_of_the_device(tmp_path: Path) -> None:
    made, x = lora_models.model(blocks=6), lora_models.inputs()
    given = lora_models.adapter("lora")
    path = given.write(tmp_path / "a.safetensors")
    plain, adapted = run(made, x), run(lora_models.merged(made, (given, 1.0)), x)
    settings: dict[str, Any] = {"convertWeightsFloatTo": None, "budgets": 0.08, "loras": "transformer"}
    with set_up({"transformer": made}, autoPreload=True, device=device("4MiB"), **settings) as managed:
        for _ in range(3):
            assert torch.equal(run(made, x), plain)
        assert preloaded(managed) > 0
        for _ in range(2):
            offload.load_loras_into_model(made, path)
            for _ in range(3):
                lora_models.assert_close(run(made, x), adapted, plain)
            assert preloaded(managed) > 0
            uploaded = engine(managed)["stats"]["uploaded_bytes"]
            for _ in range(3):
                run(made, x)
            assert engine(managed)["stats"]["uploaded_bytes"] == uploaded, "nothing moves any more"
            offload.unload_loras_from_model(made)
            for _ in range(3):
                assert torch.equal(run(made, x), plain)
