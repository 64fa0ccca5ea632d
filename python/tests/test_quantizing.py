"""Quantizing on the fly: which layers, to what numbers, in place or while loading, saved and loaded again."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attach_models import DIM, MlpBlock, attached, host, inputs, run, same_bits, snapshot
from torch import nn

import weightstream
from weightstream import LoadingCancelled, NotAvailableError, offload
from weightstream.offload.building import empty_weights
from weightstream.offload.choosing import choose_layers
from weightstream.quant import QuantEmbedding, QuantLinear, QuantModule

KINDS = ("qint8", "qfloat8", "qfloat8_e5m2", "qint4", "qint2")
COSINE = {"qint8": 0.9999, "qfloat8": 0.999, "qfloat8_e5m2": 0.996, "qint4": 0.99, "qint2": 0.85}
"""How close outputs stay to those of floats, at least."""


class Named(nn.Module):
    """A tower, a large and a small child beside it, ties and locks."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.small = nn.Linear(8, DIM)
        self.blocks = nn.ModuleList(MlpBlock() for _ in range(blocks))
        self.first = nn.Linear(DIM, DIM, bias=False)
        self.second = nn.Linear(DIM, DIM, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.small(x)
        for block in self.blocks:
            x = block(x)
        return self.second(self.first(x)) + self.table[0]


def floats(dtype: torch.dtype = torch.bfloat16, blocks: int = 6) -> Named:
    torch.manual_seed(0)
    return Named(blocks).to(dtype).eval()


def quantized_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, QuantModule)}


EVERY = {f"blocks.{n}.{layer}" for n in range(6) for layer in ("up", "down")}


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(one.flatten().double(), other.flatten().double(), 0).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_stay_close_and_stream(kind: str, dtype: torch.dtype) -> None:
    model, x = floats(dtype), inputs().to(dtype)
    before, state = run(model, x), snapshot(model)
    done = offload.quantize(model, kind)
    assert done == {name: {"weights": kind, "activations": "none"} for name in EVERY} == model._quanto_map
    assert quantized_names(model) == EVERY
    resident = run(model, x)
    assert resident.dtype == dtype and cosine(resident, before) > COSINE[kind]
    for name, tensor in model.state_dict().items():
        if name in state:  # biases, norms, buffers and layers that were left out
            assert same_bits(tensor, state[name]), name
    with attached(model, device=host(), budget=int(sum(p.nbytes for p in model.parameters()) * 0.7)) as attachment:
        for _ in range(3):
            assert same_bits(run(model, x), resident)
        assert attachment.stats()["copies"] > 0
    assert offload.quantize(model, kind) is None  # it is quantized already


def test_types_by_name_and_as_objects_of_others() -> None:
    others = [SimpleNamespace(name="qint8"), "qint8", offload.qint8]
    for given in others:
        model = floats(blocks=2)
        assert all(entry["weights"] == "qint8" for entry in offload.quantize(model, given).values())
    assert offload.qfloat8 is offload.qfloat8_e4m3fn
    for wrong in ("int8", None, torch.int8, SimpleNamespace(name="qfloat8_e4m3fnuz")):
        with pytest.raises(NotAvailableError, match="qint8, "):
            offload.quantize(floats(blocks=2), wrong)


def test_what_is_left_out() -> None:
    model = floats()
    assert choose_layers(model, "qint8").layers == EVERY
    assert choose_layers(model, "qint8", "*.up").layers == {name for name in EVERY if name.endswith("down")}
    assert choose_layers(model, "qint8", ["blocks.0", "blocks.1.up.weight"]).layers == {
        name for name in EVERY if not name.startswith("blocks.0.") and name != "blocks.1.up"
    }
    plan = choose_layers(model, "qint8", ["nothing.*", "blocks.2"])
    assert plan.notes == ["quantize_exclude names nothing of the model with 'nothing.*'"]
    model.blocks[3].up._lock_dtype = torch.float32
    model.blocks[4].down.weight._lock_dtype = True
    assert choose_layers(model, "qint8").layers == EVERY - {"blocks.3.up", "blocks.4.down"}
    # All of a block together, in the order in which it runs.
    assert choose_layers(floats(), "qint8").blocks == [[f"blocks.{n}.up", f"blocks.{n}.down"] for n in range(6)]


def test_too_much_outside_the_towers_is_quantized_after_all() -> None:
    model = floats()
    model.large = nn.Embedding(4096, DIM)
    plan = choose_layers(model, "qint8")
    # Ties stay as they are in any case.
    assert plan.layers == EVERY | {"small", "large"} and "lie outside its towers" in plan.notes[0]
    flat = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    assert choose_layers(flat, "qint8").layers == {"0", "1"}
    offload.quantize(model)
    assert type(model.large) is QuantEmbedding and type(model.small) is QuantLinear
    assert type(model.first) is nn.Linear and model.first.weight is model.second.weight


def test_layers_that_cannot_be_are_left_as_they_are() -> None:
    model = nn.Module()
    model.plain, model.one = nn.Linear(DIM, 2048), nn.Linear(DIM, 1, bias=False)
    model.attention = nn.MultiheadAttention(DIM, 4)
    model.bounded = nn.Embedding(9, DIM, max_norm=1.0)
    model.whole = nn.Linear(DIM, DIM).to(torch.float64)
    plan = choose_layers(model, "qint4")
    assert plan.layers == {"plain"} and "single group" in plan.notes[0]
    # One row has a scale, as any other.
    assert choose_layers(model, "qint8").layers == {"plain", "one"}


@pytest.mark.parametrize("kind", KINDS)
def test_saved_loaded_and_saved_again(kind: str, tmp_path: Path) -> None:
    model, x = floats(), inputs().bfloat16()
    path = tmp_path / "x.safetensors"
    model._config = {"a": 1}
    offload.save_model(model, path, do_quantize=True, quantizationType=kind)
    expected = run(model, x)
    assert quantized_names(model) == EVERY
    sd, quantization_map, tied = offload.load_sd(path)
    assert quantization_map == model._quanto_map and tied == {"first.weight": ["second.weight"]}
    assert sd["blocks.0.up.input_scale"].shape == () and "blocks.0.up.weight._scale" in sd
    with empty_weights():
        loaded = Named()
    offload.load_model_data(loaded, path)
    assert quantized_names(loaded) == EVERY and loaded._quanto_map == model._quanto_map
    assert same_bits(run(loaded.eval(), x), expected)
    offload.save_model(loaded, tmp_path / "again.safetensors", config_file_path=None)
    again, _, _ = offload.load_sd(tmp_path / "again.safetensors")
    assert set(again) == set(sd) and all(same_bits(again[name], tensor) for name, tensor in sd.items())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_quantized_while_loading(stored: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    offload.save_model(floats(stored), path)
    expected = floats(stored).to(torch.bfloat16)
    offload.quantize(expected, quantize_exclude="*.down")
    with empty_weights():
        loaded = Named()
    loaded.blocks[1].up._lock_dtype = True
    heard: list[tuple] = []
    callback = offload.LoadingCallback(progress=lambda *phase: heard.append(phase[:3]))
    with offload.loading_context(callback):
        offload.load_model_data(loaded, path, do_quantize=True, quantize_exclude="*.down")
    assert heard[-7:] == [*(("Quantization", n, 5) for n in range(6)), ("Weights Loaded", 3, 3)]
    assert loaded.blocks[1].up.weight.dtype == stored
    state = expected.state_dict()
    for name, tensor in loaded.state_dict().items():
        if not name.startswith("blocks.1.up") and name != "table":
            assert same_bits(tensor, state[name]), name
    assert loaded.table.dtype == stored and same_bits(loaded.table, floats(stored).table)
    assert loaded._quanto_map == {
        f"blocks.{n}.up": {"weights": "qint8", "activations": "none"} for n in (0, 2, 3, 4, 5)
    }
    # A file that is quantized stays what it is.
    offload.save_model(loaded, path)
    with empty_weights():
        other = Named()
    offload.load_model_data(other, path, do_quantize=True, quantizationType="qint4")
    assert other._quanto_map == loaded._quanto_map


def test_an_abort_while_loading_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    offload.save_model(floats(), path)
    for stop in range(6):
        with empty_weights():
            model = Named()
        modules = dict(model.named_modules())
        seen: list[int] = []

        def report(phase: str, done: int, *_: Any, seen: list[int] = seen) -> None:
            if phase == "Quantization":
                seen.append(done)

        callback = offload.LoadingCallback(lambda stop=stop, seen=seen: len(seen) > stop, report)
        with pytest.raises(LoadingCancelled), offload.loading_context(callback):
            offload.load_model_data(model, path, do_quantize=True)
        assert seen == list(range(stop + 1))
        assert dict(model.named_modules()) == modules and all(p.is_meta for p in model.parameters())
        assert not hasattr(model, "_quanto_map")
        offload.load_model_data(model, path, do_quantize=True)
        assert quantized_names(model) == EVERY


def test_an_abort_in_place_can_be_gone_on_with() -> None:
    model, x = floats(), inputs().bfloat16()
    expected = floats()
    offload.quantize(expected)
    seen: list[int] = []
    callback = offload.LoadingCallback(lambda: len(seen) > 2, lambda phase, done, *_: seen.append(done))
    with pytest.raises(LoadingCancelled), offload.loading_context(callback):
        offload.quantize(model)
    part = quantized_names(model)
    assert part and part < EVERY
    run(model, x)
    with pytest.raises(weightstream.StateError, match="qint8 in part"):
        offload.quantize(model, "qint4")
    assert set(offload.quantize(model)) == EVERY
    assert same_bits(run(model, x), run(expected, x))


def test_floats_go_as_packed_weights_come() -> None:
    model = floats()
    weights = [weakref.ref(block.up.weight) for block in model.blocks]
    gone: list[int] = []

    def report(phase: str, done: int, *_: Any) -> None:
        if phase == "Quantization":
            gc.collect()
            gone.append(sum(weight() is None for weight in weights))

    with offload.loading_context(offload.LoadingCallback(progress=report)):
        offload.quantize(model)
    assert gone == list(range(7))


def test_attached_models_are_refused() -> None:
    model = floats()
    with attached(model), pytest.raises(weightstream.StateError, match="detach it before quantizing"):
        offload.quantize(model)


class Shares(nn.Module):
    """Blocks that have a layer in common: the module itself, not only its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock() for _ in range(6))
        self.blocks[1].up = self.blocks[0].up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_layer_that_several_modules_have_is_left_out_and_stays_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Shares().to(torch.bfloat16).eval()
    offload.quantize(model)
    assert quantized_names(model) == EVERY - {"blocks.0.up", "blocks.1.up"}
    assert model.blocks[1].up is model.blocks[0].up
    offload.save_model(model, tmp_path / "shared.safetensors")
    with torch.device("meta"):
        loaded = Shares()
    offload.load_model_data(loaded, tmp_path / "shared.safetensors")
    x = torch.randn(2, 5, DIM, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(loaded(x), model(x))


def test_weights_without_data_are_refused_before_anything_is_quantized() -> None:
    model = floats()
    model.blocks[3].down.to("meta")
    with pytest.raises(weightstream.ModelError, match=r"blocks\.3\.down\.weight is on the meta device"):
        offload.quantize(model)
    assert quantized_names(model) == set()
    model.blocks[3].down = nn.Linear(*reversed(model.blocks[3].up.weight.T.shape), dtype=torch.bfloat16)
    assert offload.quantize(model, "qint4") is not None
    assert quantized_names(model) == EVERY


@pytest.mark.parametrize("exclude", [5, ["blocks.0", 7]])
def test_an_exclusion_that_is_no_name_is_refused(exclude: Any) -> None:
    model = floats()
    with pytest.raises(TypeError, match=r"quantize_exclude has (5|7)"):
        offload.quantize(model, quantize_exclude=exclude)
    assert quantized_names(model) == set()
