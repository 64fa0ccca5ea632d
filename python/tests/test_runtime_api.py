"""What code of models may ask: where a module computes, and its weights before a method of its own reads them."""

from __future__ import annotations

import gc
import inspect
import weakref

import pytest
import torch
from pipeline_models import check, pipeline, set_up
from torch import nn

from weightstream import (
    NotAvailableError,
    WeightstreamError,
    allocator,
    cuda_graphs,
    expert_compute,
    experts,
    runtime,
)
from weightstream.registry import Registry, registry


class Owner:
    """Stands for an attachment."""


def test_a_managed_root_or_submodule_computes_on_its_models_device_and_others_where_they_are() -> None:
    models, _, _ = pipeline("transformer", "vae")
    meta = nn.Linear(2, 2, device="meta")
    with set_up(models):
        assert runtime.execution_device(models["vae"]) == torch.device("cpu")
        assert runtime.execution_device(models["vae"].blocks[0].up) == torch.device("cpu")
        assert runtime.execution_device(meta) == torch.device("meta"), "its first parameter's"
        buffered = nn.Module()
        buffered.register_buffer("b", torch.ones(1, device="meta"))
        assert runtime.execution_device(buffered) == torch.device("meta")
        assert runtime.execution_device(nn.ReLU()) == torch.device("cpu"), "an empty module's"
        parameter_first = nn.Linear(2, 2, device="meta")
        parameter_first.register_buffer("b", torch.ones(1))
        assert runtime.execution_device(parameter_first) == torch.device("meta"), "a parameter comes before buffers"
    with pytest.raises(TypeError, match="not a str"):
        runtime.execution_device("vae")


def test_ensure_loaded_brings_what_is_resident_with_the_normal_company() -> None:
    models, references, inputs = pipeline("transformer", "vae")
    with set_up(models, coTenantsMap={}) as managed:
        check(models, references, inputs, "transformer")
        runtime.ensure_loaded(models["vae"].blocks[1])
        assert managed.loaded() == ["vae"]
        stats = managed.models["vae"].attachment.stats()
        assert stats["uploaded_bytes"] > 0
        assert stats["copies"] == 0, "blocks that stream stay out"
        weight, reference = models["vae"].last.weight, references["vae"].last.weight
        assert torch.equal(torch.relu(weight), torch.relu(reference))
        runtime.ensure_loaded(nn.Linear(2, 2))
        assert managed.loaded() == ["vae"]
        check(models, references, inputs)
    runtime.ensure_loaded(models["vae"])


def test_a_checkpoint_cancels_what_needs_a_model_that_has_to_come() -> None:
    models, references, inputs = pipeline("transformer", "vae")
    asked: list[int] = []

    def checkpoint() -> None:
        asked.append(1)
        if len(asked) > 2:
            raise RuntimeError("stop")

    with set_up(models, coTenantsMap={}) as managed:
        with runtime.execution_scope(checkpoint):
            check(models, references, inputs, "transformer", "transformer")
            assert len(asked) == 2, "before and after the model came, once"
            with pytest.raises(RuntimeError, match="stop"):
                check(models, references, inputs, "vae")
        assert managed.loaded() == ["transformer"]
        check(models, references, inputs)
    with pytest.raises(TypeError), runtime.execution_scope(None):
        pass


def test_ownership_keeps_nothing_alive_and_ends_with_its_owner() -> None:
    registry, root, shared = Registry(), nn.Module(), nn.Linear(1, 1)
    other, nested = nn.Module(), nn.Module()
    root.shared, root.nested, other.shared = shared, nested, shared
    nested.part = nn.Linear(1, 1)
    first, second, third = Owner(), Owner(), Owner()
    ends = [registry.add(nested, third), registry.add(root, first), registry.add(other, second)]
    assert registry.owner_of(nested) is third, "a root owns itself, also inside another that came later"
    assert registry.owner_of(nested.part) is first, "a shared descendant is the last one's that was configured"
    assert registry.owner_of(shared) is second
    assert registry.owner_of(nn.Linear(1, 1)) is None
    ends[2]()
    assert registry.owner_of(shared) is first
    assert registry.owner_of(other) is None
    del first
    gc.collect()
    assert registry.owner_of(shared) is None
    assert registry.owner_of(nested.part) is third
    count = len(registry._owners)
    del root, shared, other, nested
    gc.collect()
    assert len(registry._owners) < count
    for end in ends:
        end()


def test_a_root_has_its_own_device_and_a_module_of_several_that_of_the_last_set_up() -> None:
    class Elsewhere:
        """Stands for an attachment on another device."""

        attached, device = True, torch.device("meta")

    models, _, _ = pipeline("transformer", "vae")
    models["transformer"].inner = models["vae"]
    with set_up(models, coTenantsMap={}) as managed:
        one, other = (managed.models[name].attachment for name in ("transformer", "vae"))
        assert registry.owner_of(models["transformer"]) is one
        assert registry.owner_of(models["vae"]) is other, "a root owns itself"
        assert registry.owner_of(models["vae"].first) is one, "what is in both is the last one's"
        last, root = Elsewhere(), nn.ModuleList([models["transformer"].first])
        end = registry.add(root, last)
        assert runtime.execution_device(models["transformer"].first) == torch.device("meta")
        end()
        assert runtime.execution_device(models["transformer"].first) == torch.device("cpu")
        managed.unload_all()
        assert runtime.execution_device(models["vae"].blocks[0].up) == other.device, "also while it is away"
        runtime.ensure_loaded(models["vae"])
        assert managed.loaded() == ["vae"]
    assert all(registry.owner_of(model) is None for model in models.values())


def test_ownership_keeps_neither_models_nor_managers_alive() -> None:
    models, references, inputs = pipeline("transformer", "vae")
    managed = set_up(models, autoPreload={}, coTenantsMap={})
    device = managed.models["vae"].group.target.native
    check(models, references, inputs)
    assert device.free_memory() < device.total_memory
    refs = [weakref.ref(managed), *(weakref.ref(one.attachment) for one in managed.models.values())]
    refs += [weakref.ref(model) for model in models.values()]
    del managed, models
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)
    assert device.free_memory() == device.total_memory, "dropped without a release"


def test_compilation_alone_enables_no_graphs() -> None:
    models, references, inputs = pipeline("transformer")
    with set_up(models, compile="transformer") as managed:
        with cuda_graphs.scope():
            assert cuda_graphs.is_enabled(models["transformer"]) is False
        assert managed.parameters.compile == "transformer"


def test_stages_are_called_as_they_are() -> None:
    layer, other = nn.Linear(3, 3), nn.Linear(3, 3)
    x = torch.randn(2, 3)
    other.twice = lambda x, times=2: other(x) * times
    with cuda_graphs.scope(), torch.no_grad():
        assert torch.equal(cuda_graphs.run(layer, x, owner=other), layer(x))
        assert torch.equal(cuda_graphs.run(other, x, method="twice", enabled=False, times=3), other(x) * 3)
        assert cuda_graphs.is_enabled(layer) is False
    with torch.no_grad():
        assert torch.equal(cuda_graphs.run(layer, x), layer(x)), "outside a scope"
    assert cuda_graphs.is_enabled(layer) is False


def test_a_stage_that_uses_a_managed_models_weights_has_them() -> None:
    models, references, inputs = pipeline("transformer", "vae")
    with set_up(models, coTenantsMap={}), torch.no_grad(), cuda_graphs.scope():
        for name in ("vae", "transformer"):
            model, reference, x = models[name], references[name], inputs[name]
            check(models, references, inputs, "transformer" if name == "vae" else "vae")
            assert torch.equal(cuda_graphs.run(model.last, x, owner=model), reference.last(x))
            assert torch.equal(cuda_graphs.run(model, x, method="encode"), reference.encode(x))


def test_what_is_not_built_says_so() -> None:
    calls = {
        lambda: allocator.install(): "allocator.install",
        lambda: allocator.install(mode="vmm", spill=True): "allocator.install",
        lambda: allocator.stats(): "allocator.stats",
        lambda: allocator.stats(device=0): "allocator.stats",
        lambda: experts.ExpertBank([1], lease=2): "experts.ExpertBank",
        lambda: expert_compute.SwiGLUExperts(3): "expert_compute.SwiGLUExperts",
    }
    for call, name in calls.items():
        with pytest.raises(NotAvailableError, match=f"{name}.*not built yet") as caught:
            call()
        assert isinstance(caught.value, WeightstreamError)
    defaults = {name: p.default for name, p in inspect.signature(allocator.install).parameters.items()}
    assert defaults == {"mode": "vmm", "spill": False}
    assert {name: p.default for name, p in inspect.signature(allocator.stats).parameters.items()} == {"device": None}
