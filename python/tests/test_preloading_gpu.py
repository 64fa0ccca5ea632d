"""Preloading on a GPU: what is measured, what is filled, and what is given back before an allocation fails."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pipeline_models import Model
from shared_models import Guided

from weightstream import allocator, offload
from weightstream.offload.managed import OffloadObject
from weightstream.step_memory import memory_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

MIB = 1 << 20
BUDGET = 200
"""In MB, of a model of 384."""


@pytest.fixture
def setting() -> Iterator[tuple[OffloadObject, Model, Model, torch.Tensor]]:
    torch.manual_seed(0)
    model = Model(2048, 24).eval()
    reference = copy.deepcopy(model).bfloat16().cuda()
    x = torch.randn(64, 2048).bfloat16().cuda()
    settings = {"quantizeTransformer": False, "budgets": BUDGET, "autoPreload": {}, "device": "cuda"}
    try:
        with offload.all({"transformer": model}, **settings) as managed:
            yield managed, model, reference, x
    finally:
        FILLERS.clear()
        torch.cuda.empty_cache()


def preloaded(managed: OffloadObject) -> int:
    return managed.models["transformer"].attachment._runtime.offloader.preloaded()


FILLERS: list[torch.Tensor] = []
"""What a test takes of the device, given back when it ends, however it ends."""


def free() -> int:
    return torch.cuda.mem_get_info()[0]


def fill_but(left: int) -> None:
    """Takes all of the device's memory but so much."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    FILLERS.append(torch.empty(free() - left, dtype=torch.uint8, device="cuda"))


@torch.inference_mode()
def test_the_second_step_fills_the_device_and_others_get_it_back(
    setting: tuple[OffloadObject, Model, Model, torch.Tensor],
) -> None:
    managed, model, reference, x = setting
    for step in range(4):
        assert torch.equal(model(x), reference(x)), step
        assert (preloaded(managed) > 0) == (step > 0)
    need = next(iter(managed.parameters.autoPreload.values()))
    assert 0 < need < 64 * MIB, "some activations of 64 rows"
    copies = managed.models["transformer"].attachment.stats()["copies"]
    assert torch.equal(model(x), reference(x))
    assert managed.models["transformer"].attachment.stats()["copies"] == copies, "all of it is resident"
    full = preloaded(managed)
    fill_but(128 * MIB)
    assert torch.equal(model(x), reference(x))
    # 256 MiB are left free beside what the step takes.
    fewer = preloaded(managed)
    assert full - 192 * MIB < fewer < full - 96 * MIB
    assert free() >= 224 * MIB
    FILLERS.clear()
    torch.cuda.empty_cache()
    for _ in range(2):
        assert torch.equal(model(x), reference(x))
    assert preloaded(managed) == full


@torch.inference_mode()
def test_memory_that_runs_out_is_given_back_by_hand_in_the_step(
    setting: tuple[OffloadObject, Model, Model, torch.Tensor],
) -> None:
    managed, model, reference, x = setting
    for _ in range(3):
        assert torch.equal(model(x), reference(x))
    full, freed = preloaded(managed), []

    def give(*_: object) -> None:
        freed.append(managed.release_preload(64 * MIB))

    hook = model.blocks[11].down.register_forward_pre_hook(give)
    for _ in range(3):
        assert torch.equal(model(x), reference(x))
    hook.remove()
    assert freed[0] >= 64 * MIB and preloaded(managed) <= full
    assert torch.equal(model(x), reference(x))


@torch.inference_mode()
def test_an_allocation_that_would_fail_takes_what_was_preloaded(
    setting: tuple[OffloadObject, Model, Model, torch.Tensor],
) -> None:
    managed, model, reference, x = setting
    allocator.serve_pressure()
    try:
        for _ in range(3):
            assert torch.equal(model(x), reference(x))
        full = preloaded(managed)

        def take(*_: object) -> None:
            # Somebody takes what is left in the middle of the step; what the step takes then is not there.
            fill_but(32 * MIB)
            FILLERS.append(torch.full((96 * MIB,), 7, dtype=torch.uint8, device="cuda"))

        hook = model.blocks[11].register_forward_pre_hook(take)
        got, expected = model(x), reference(x)
        hook.remove()
        assert torch.equal(got, expected)
        assert len(FILLERS) == 2 and int(FILLERS[1].min()) == 7
        assert preloaded(managed) <= full - 64 * MIB
        FILLERS.clear()
        assert torch.equal(model(x), reference(x))
    finally:
        allocator.serve_pressure(on=False)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 64 * MIB, "nothing of it is kept"


def test_what_forwards_allocated_is_given_back_when_memory_is_trimmed(
    setting: tuple[OffloadObject, Model, Model, torch.Tensor],
) -> None:
    managed, *_ = setting
    memory = memory_of(managed.models["transformer"].group.target)

    def kept_by_the_allocator() -> int:
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def allocate(size: int) -> None:
        torch.empty(size, dtype=torch.uint8, device="cuda")

    before = kept_by_the_allocator()
    with memory.allocating():
        used = torch.full((32 * MIB,), 7, dtype=torch.uint8, device="cuda")
        allocate(512 * MIB)
        with memory.allocating():  # a model's step in another's
            allocate(768 * MIB)
    assert kept_by_the_allocator() >= before + 768 * MIB
    memory.trim()
    assert kept_by_the_allocator() < before + 64 * MIB and int(used.min()) == 7
    with memory.allocating():
        allocate(512 * MIB)
        memory.trim()
        assert kept_by_the_allocator() >= before + 512 * MIB, "it is in use until its step ends"
    del used
    assert kept_by_the_allocator() < before + 8 * MIB

    both = threading.Barrier(2, timeout=60)

    def step() -> bool:
        with memory.allocating():
            both.wait()
            allocate(64 * MIB)
            both.wait()
        return True

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(lambda _: step(), range(2)))
    memory.trim()
    assert kept_by_the_allocator() < before + 8 * MIB


@torch.inference_mode()
def test_what_two_models_share_fills_what_each_leaves_and_gives_it_back() -> None:
    torch.manual_seed(0)
    encoder = Model(2048, 12)
    models = {name: Guided(encoder, 12, 2048).eval() for name in ("prior", "decoder")}
    references = copy.deepcopy(models)
    for reference in references.values():
        reference.bfloat16().cuda()
    x = torch.randn(64, 2048).bfloat16().cuda()
    settings = {"quantizeTransformer": False, "budgets": 150, "autoPreload": {}, "coTenantsMap": {}, "device": "cuda"}
    try:
        with offload.all(models, **settings) as managed:
            shared = managed.shared["prior+decoder"].attachment

            def check(name: str, times: int = 1) -> None:
                for _ in range(times):
                    assert torch.equal(models[name](x), references[name](x)), name

            for name in ("prior", "decoder", "prior"):
                check(name, 4)
                full, copies = shared._runtime.offloader.preloaded(), shared.stats()["copies"]
                check(name, 2)
                assert full > 0 and shared.stats()["copies"] == copies, "all of it is resident"
            fill_but(64 * MIB)
            check("prior", 3)
            own = managed.models["prior"].attachment._runtime.offloader
            assert free() >= 224 * MIB, "256 MiB are left free beside what the step takes"
            assert shared._runtime.offloader.preloaded() + own.preloaded() > 0
            FILLERS.clear()
            torch.cuda.empty_cache()
            check("decoder", 3)
            check("prior", 3)
            assert shared._runtime.offloader.preloaded() == full
            assert managed.release_preload() > 0 and shared._runtime.offloader.preloaded() == 0
            check("prior")
    finally:
        FILLERS.clear()
        torch.cuda.empty_cache()
