"""Adapters of models that were declared, of models inside others, of models that share them, and of copies."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from attach_models import run
from lora_models import Block, adapter, assert_close, copied, inputs, merged, model
from pipeline_models import device
from safetensors.torch import save_file
from test_lora_calls import expect, files, is_plain, paths
from torch import nn

from weightstream import StateError, WeightsError, offload
from weightstream.adapters.state import state_of

__all__ = ["files"]


def test_a_model_that_was_not_declared_is_refused(files: Any) -> None:
    first, second = model(), model(seed=1)
    models = {"transformer": first, "transformer2": second}
    settings = {"quantizeTransformer": False, "device": device(), "convertWeightsFloatTo": None, "budgets": 0}
    with offload.all(models, loras="transformer", verboseLevel=0, **settings):
        offload.load_loras_into_model(first, paths(files, "a"), [0.5])
        expect(first, files, a=0.5)
        with pytest.raises(StateError, match="transformer2 was not declared.*loras="):
            offload.load_loras_into_model(second, paths(files, "a"))
    assert is_plain(first) and state_of(first) is None
    offload.load_loras_into_model(second, paths(files, "a"), [0.5])
    expect(second, files, a=0.5)


class Root(nn.Module):
    """A model whose parts are set up by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.rest = model(), model(seed=1), nn.Linear(16, 16)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.rest(self.one(index) + self.two(index))


def test_parts_that_are_declared_are_one_model_to_their_root(tmp_path: Path) -> None:
    root, x = Root().eval(), inputs()
    given = adapter("lora")
    tensors = {f"{part}.{key}": value.clone() for part in ("one", "two") for key, value in given.tensors.items()}
    path = str(tmp_path / "a.safetensors")
    save_file(tensors, path)
    rest = {**tensors, "rest.lora_A.weight": torch.zeros(4, 16), "rest.lora_B.weight": torch.zeros(16, 4)}
    bad = str(tmp_path / "b.safetensors")
    save_file(rest, bad)
    models = {"one": root.one, "two": root.two}
    settings = {"quantizeTransformer": False, "device": device(), "convertWeightsFloatTo": None, "budgets": 0}
    with offload.all(models, loras=["one", "two"], verboseLevel=0, **settings):
        assert offload.load_loras_into_model(root, [path, bad], [[0.5, 0.25]]) == [path]
        assert "rest" in dict(root._loras_errors)[bad]
        for caller in (root, root.one, root.two):
            for step, value in ((0, 0.5), (1, 0.25)):
                offload.set_step_no_for_lora(caller, step)
                for part in (root.one, root.two):
                    assert_close(run(part, x), run(merged(part, (given, value)), x), torch.zeros(0))
        with pytest.raises(StateError, match="part of a Root"):
            offload.load_loras_into_model(root.one, path)
        offload.unload_loras_from_model(root.two)
        for part in (root.one, root.two):
            assert_close(run(part, x), run(merged(part), x), torch.zeros(0))


def test_models_that_are_synchronized_share_tensors_but_not_the_step(files: Any) -> None:
    first, second = model(), model(seed=1)
    offload.load_loras_into_model(first, paths(files, "ab"), [[1.0, 0.5], 0.25])
    offload.sync_models_loras(first, second)
    loaded = state_of(first).set.loaded
    assert state_of(second).set.loaded is loaded
    offload.set_step_no_for_lora(first, 1)
    expect(first, files, a=0.5, b=0.25)
    expect(second, files, a=1.0, b=0.25)
    offload.activate_loras(first, [1], [2.0])
    expect(first, files, b=2.0)
    expect(second, files, b=2.0)
    offload.unload_loras_from_model(first)
    expect(second, files, b=2.0)
    offload.sync_models_loras(first, second)
    assert is_plain(second)
    with pytest.raises(StateError, match="twice"):
        offload.sync_models_loras(first, first)
    offload.load_loras_into_model(first, paths(files, "a"))
    third = nn.ModuleDict({"blocks": nn.ModuleList([Block()])})
    with pytest.raises(WeightsError, match="architecture: blocks"):
        offload.sync_models_loras(first, third)
    assert is_plain(third)


def test_copies_of_a_model_are_models_of_their_own(files: Any) -> None:
    made = model()
    twin = copied(made)
    offload.load_loras_into_model(made, paths(files, "a"))
    expect(twin, files)
    assert state_of(twin) is None
    # A copy would have forwards that compute with the weights of the first.
    for call in (lambda: copied(made), lambda: pickle.dumps(made), lambda: copied(made.blocks[0].up)):
        with pytest.raises(StateError, match="LoRAs"):
            call()
    offload.unload_loras_from_model(made)
    expect(copied(made), files)
    assert all(not method.startswith("__") for module in made.modules() for method in module.__dict__)
