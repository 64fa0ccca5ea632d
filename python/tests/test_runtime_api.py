"""What code of models may ask: where a module computes, and its weights before a method of its own reads them."""

from __future__ import annotations

import gc

import pytest
import torch
from pipeline_models import check, pipeline, set_up
from torch import nn

from weightstream import NotAvailableError, allocator, cuda_graphs, expert_compute, experts, runtime
from weightstream.registry import Registry


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


def test_stages_are_called_as_they_are() -> None:
    layer, other = nn.Linear(3, 3), nn.Linear(3, 3)
    x = torch.randn(2, 3)
    other.twice = lambda x, times=2: other(x) * times
    with cuda_graphs.scope(), torch.no_grad():
        assert torch.equal(cuda_graphs.run(layer, x, owner=other), layer(x))
        assert torch.equal(cuda_graphs.run(other, x, method="twice", enabled=False, times=3), other(x) * 3)
        assert cuda_graphs.is_enabled(layer) is False


def test_what_is_not_built_says_so() -> None:
    for call in (allocator.install, allocator.stats, experts.ExpertBank, expert_compute.SwiGLUExperts):
        with pytest.raises(NotAvailableError, match="not built yet"):
            call()
