"""What models of a pipeline share fills what their workloads leave free, too, and gives it back before it is missed."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from pipeline_models import Model, device, set_up
from preloading_models import Allocated
from shared_models import CASES, WIDTH, check, encoder_of_two, fail_somewhere, held, made, model_in_another

from weightstream import DeviceError, allocator, preloading
from weightstream.offload.managed import ManagedModel, OffloadObject

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloading, "MEASURED", {})


def everything(managed: OffloadObject) -> dict[str, ManagedModel]:
    return {**managed.models, **managed.shared}


def preloaded(managed: OffloadObject, name: str) -> int:
    return everything(managed)[name].attachment._runtime.offloader.preloaded()


def stats(managed: OffloadObject, name: str) -> dict[str, Any]:
    return everything(managed)[name].attachment.stats()


def native(managed: OffloadObject) -> Any:
    return next(iter(managed.models.values())).group.target.native


def test_what_models_share_is_resident_from_the_second_step_on() -> None:
    models, references, x = made(encoder_of_two)
    with set_up(models, budgets=0.2, coTenantsMap={}, autoPreload=True, device=device("8MiB")) as managed:
        for name in models:
            check(models, references, x, name)
            assert preloaded(managed, "prior+decoder") == 0, "its first step is measured"
            for _ in range(3):
                check(models, references, x, name)
            assert preloaded(managed, "prior+decoder") > 0
            copies = stats(managed, "prior+decoder")["copies"]
            for _ in range(3):
                check(models, references, x, name)
            assert stats(managed, "prior+decoder")["copies"] == copies, "all of it fits"
    check(models, references, x)


def test_a_model_in_another_is_filled_alone_and_in_it() -> None:
    models, references, x = made(model_in_another)
    budgets = {"text_encoder": 0.15, "transformer": 0.12}
    with set_up(models, budgets=budgets, coTenantsMap={}, autoPreload=True, device=device("8MiB")) as managed:
        for name in ("text_encoder", "transformer"):
            for _ in range(4):
                check(models, references, x, name)
            copies = stats(managed, "text_encoder")["copies"]
            check(models, references, x, name)
            assert stats(managed, "text_encoder")["copies"] == copies and preloaded(managed, "text_encoder") > 0
        workloads = sorted(preloading.MEASURED)
        assert [name.partition("/")[0] for name in workloads] == ["text_encoder", "transformer"]


class Activations:
    """Takes device memory in a model's forward, as activations do."""

    def __init__(self, managed: OffloadObject, model: Any, size: int, where: str = "body") -> None:
        self.managed, self.size = managed, size
        self.freed: list[int] = []
        self.held: list[Any] = []
        place = model.get_submodule(where)
        self.hooks = [place.register_forward_pre_hook(self.take), model.register_forward_hook(self.give)]

    def take(self, *_: object) -> None:
        place = native(self.managed)
        try:
            self.held.append(place.occupy(self.size))
        except DeviceError:
            self.freed.append(self.managed.release_preload(self.size - place.free_memory()))
            self.held.append(place.occupy(self.size))

    def give(self, *_: object) -> None:
        while self.held:
            self.held.pop().release()

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


@pytest.mark.parametrize("size", ["640KiB", "768KiB", "1MiB"])
def test_a_step_is_left_what_it_took_when_it_was_measured(size: str) -> None:
    models, references, x = made(encoder_of_two)
    need = 300 << 10
    with set_up(models, budgets=0.12, coTenantsMap={}, autoPreload=True, device=device(size)) as managed:
        activations = Activations(managed, models["prior"], need)
        for _ in range(5):
            check(models, references, x, "prior")
        assert activations.freed == [], "what was preloaded left room for the step"
        total = native(managed).total_memory
        assert held(managed) + need <= total
        assert set(preloading.MEASURED.values()) == {need}
        activations.remove()


@pytest.mark.parametrize("where", ["encoder", "encoder.blocks.3", "body", "body.blocks.2"])
def test_memory_that_runs_out_in_a_models_step_is_given_back_by_what_it_shares(where: str) -> None:
    models, references, x = made(encoder_of_two)
    with set_up(models, budgets=0.12, coTenantsMap={}, autoPreload=True, device=device("1MiB")) as managed:
        for _ in range(4):
            check(models, references, x, "prior")
        before = preloaded(managed, "prior+decoder")
        activations = Activations(managed, models["prior"], 760 << 10, where)
        check(models, references, x, "prior")
        assert len(activations.freed) == 1 and preloaded(managed, "prior+decoder") < before
        for _ in range(4):
            check(models, references, x, "prior")
        assert len(activations.freed) == 1, "it is the workload's need from then on"
        activations.remove()
        assert managed.release_preload() >= 0
        assert all(preloaded(managed, name) == 0 for name in everything(managed))
        check(models, references, x)


@pytest.mark.parametrize("where", ["encoder.blocks.2", "body.blocks.1"])
def test_an_allocation_that_would_fail_takes_what_was_preloaded_of_it(where: str) -> None:
    models, references, x = made(encoder_of_two)
    allocator.serve_pressure()
    try:
        with set_up(models, budgets=0.12, coTenantsMap={}, autoPreload=True, device=device("1MiB")) as managed:
            for _ in range(4):
                check(models, references, x, "prior")
            names = ("prior", "prior+decoder")
            full = sum(preloaded(managed, name) for name in names)
            runtime = managed.shared["prior+decoder"].attachment._runtime
            memory, found = Allocated(runtime.preloading.allocations.number), []
            place = models["prior"].get_submodule(where)
            start = place.register_forward_pre_hook(lambda *_: found.append(memory.allocate(760 << 10)))
            end = models["prior"].register_forward_hook(lambda *_: memory.free())
            check(models, references, x, "prior")
            less = sum(preloaded(managed, name) for name in names)
            assert found == [True] and less < full
            for _ in range(4):
                check(models, references, x, "prior")
            assert all(found) and sum(preloaded(managed, name) for name in names) <= less, "it counts from then on"
            start.remove()
            end.remove()
            check(models, references, x)
    finally:
        allocator.serve_pressure(on=False)


def test_what_leaves_comes_back_with_its_budget_alone() -> None:
    models, references, x = made(encoder_of_two)
    both = {**models, "vae": Model(WIDTH, 3).bfloat16().eval()}
    with set_up(both, budgets=0.12, coTenantsMap={}, autoPreload=True, device=device("1MiB")) as managed:
        for _ in range(3):
            for _ in range(3):
                check(models, references, x, "prior")
            assert preloaded(managed, "prior+decoder") > 0
            with torch.no_grad():
                both["vae"](x)
            assert managed.loaded() == ["vae"] and preloaded(managed, "prior+decoder") == 0
        somebody = native(managed).occupy(native(managed).free_memory() // 2)
        check(models, references, x, "prior", "decoder")
        somebody.release()
        managed.unload_all()
        assert held(managed) == 0


@pytest.mark.parametrize("build", CASES)
def test_the_bits_stay_whoever_runs_and_the_device_is_never_taken_beyond_the_coefficient(build: Any) -> None:
    models, references, x = made(build)
    names, draw = list(models), random.Random(4)
    settings = {"budgets": 0.15, "autoPreload": True, "vram_safety_coefficient": 0.7, "device": device("1200KiB")}
    with set_up(models, coTenantsMap={}, **settings) as managed:
        most = 0.7 * native(managed).total_memory
        for _ in range(30):
            check(models, references, x, draw.choice(names))
            if draw.random() < 0.15:
                managed.unload_all(draw.sample(names, 1))
            if draw.random() < 0.1:
                managed.release_preload(draw.choice([None, 1 << 16]))
            assert held(managed) <= most
        managed.unload_all()
        assert held(managed) == 0
        check(models, references, x)
    check(models, references, x)


def test_errors_in_steps_leave_all_of_it_right() -> None:
    models, references, x = made(encoder_of_two)
    draw = random.Random(3)
    with set_up(models, budgets=0.15, coTenantsMap={}, autoPreload=True, device=device("1MiB")) as managed:
        for _ in range(20):
            fail_somewhere(models, references, x, draw)
            check(models, references, x)
        assert held(managed) > 0


def test_a_model_that_is_dropped_leaves_nothing() -> None:
    models, references, x = made(encoder_of_two)
    managed = set_up(models, budgets=0.15, autoPreload=True, coTenantsMap={})
    target = native(managed)
    del managed
    for _ in range(3):
        check(models, references, x)
    for name in list(models):
        del models[name]
        gc.collect()
        check(models, references, x, *models)
    gc.collect()
    assert target.free_memory() == target.total_memory


def test_what_is_compiled_or_copied_when_it_is_used_is_left_alone() -> None:
    models, references, x = made(encoder_of_two)
    for settings in ({"compile": "prior"}, {"asyncTransfers": False}):
        with set_up(models, budgets=0.2, coTenantsMap={}, autoPreload=True, **settings) as managed:
            runtime = managed.shared["prior+decoder"].attachment._runtime
            assert runtime.preloading is None
            if "compile" not in settings:
                check(models, references, x)
