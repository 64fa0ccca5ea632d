"""An application's own handlers, written for the contract of mmgp's quant_router: only the import is ours."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_files import write
from quant_files import fp8_parts, int8_numbers, int8_parts
from torch import Tensor, nn
from torch.nn import functional as F

from weightstream import QuantizationError, offload, quant_router
from weightstream.quant import QuantLinear

HANDLER = '''
"""Weights of four bits, two a byte, with a scale a row. What an application would write."""
import torch
from torch import nn

HANDLER_NAME = "demo4"
HANDLER_PRIORITY = 7
seen = []


class qtype:
    def __init__(self, name):
        self.name = name


demo4 = qtype("demo4")


def detect(state_dict, verboseLevel=1, metadata=None):
    seen.append({name: (tensor.device.type, tensor.dtype, tuple(tensor.shape)) for name, tensor in state_dict.items()})
    found = [name for name in state_dict if name.endswith(".demo4_scale")]
    return {"matched": bool(found), "kind": "demo4" if found else "none", "details": {"names": found}}


def convert_to_quanto(state_dict, default_dtype, verboseLevel=1, detection=None, metadata=None):
    sd, quant_map = dict(state_dict), {}
    for name in detection["details"]["names"]:
        quant_map[name[: -len(".demo4_scale")]] = {"weights": "demo4", "activations": "none"}
    sd.pop("demo4_marker", None)
    return {"state_dict": sd, "quant_map": quant_map}


def split_fused_weights(state_dict, fused_split_map, quantization_map=None, allowed_bases=None, **kwargs):
    out, bases = dict(state_dict), set()
    for base in allowed_bases:
        sizes = fused_split_map["qkv"]["split_sizes"]
        for leaf in ("weight", "demo4_scale", "bias"):
            tensor = out.pop(base + "." + leaf)
            for part, rows in zip(fused_split_map["qkv"]["mapped_modules"], tensor.split(sizes)):
                out[base[: -len("qkv")] + part + "." + leaf] = rows
        bases.add(base)
    return out, bases


class QLinearDemo4(nn.Module):
    """The one class of layers."""

    def __init__(self, columns, rows, bias, weights):
        super().__init__()
        self.in_features, self.out_features, self.kind = columns, rows, weights
        self.weight = nn.Parameter(torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta"), requires_grad=False)
        self.demo4_scale = nn.Parameter(torch.empty(rows, 1, device="meta"), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows, device="meta"), requires_grad=False) if bias else None

    @classmethod
    def qcreate(cls, module, weights=None, activations=None, optimizer=None, device=None):
        return cls(module.in_features, module.out_features, module.bias is not None, weights)

    def forward(self, x):
        low, high = (self.weight & 15).float() - 8, (self.weight >> 4).float() - 8
        numbers = torch.stack([low, high], -1).flatten(1) * self.demo4_scale
        return nn.functional.linear(x, numbers, self.bias)
'''


@pytest.fixture
def handler(request: pytest.FixtureRequest) -> Any:
    """The application's module, importable by its name and registered for one test."""
    module = types.ModuleType("demo_formats.four_bits")
    module.__package__ = "demo_formats"
    sys.modules["demo_formats"] = types.ModuleType("demo_formats")
    sys.modules[module.__name__] = module
    exec(compile(HANDLER, "four_bits.py", "exec"), module.__dict__)
    quant_router.register_handler("demo_formats.four_bits")
    yield module
    quant_router.unregister_handler(module)
    del sys.modules["demo_formats.four_bits"], sys.modules["demo_formats"]


def demo_parts(rows: int, columns: int, name: str) -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randint(0, 16, (rows, columns))
    scale = torch.rand(rows, 1) + 0.1
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return {f"{name}.weight": packed, f"{name}.demo4_scale": scale}, (codes.float() - 8) * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(32, 32, device="meta") for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))))


def mixed() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Four layers: the application's format, two built-in ones, and plain; and the numbers of each."""
    torch.manual_seed(0)
    parts, a = demo_parts(32, 32, "a")
    sd = {**parts, **int8_parts(32, 32, "b.weight"), **fp8_parts(32, 32, "c.weight"), "d.weight": torch.randn(32, 32)}
    sd.update({f"{name}.bias": torch.randn(32) for name in "abcd"})
    sd["demo4_marker"] = torch.zeros(1)
    return sd, {"a": a, "b": int8_numbers(sd, "b.weight"), "c": int8_numbers(sd, "c.weight"), "d": sd["d.weight"]}


def test_a_module_for_that_contract_works_beside_the_built_in_formats(handler: Any, tmp_path: Path) -> None:
    sd, numbers = mixed()
    model = Net()
    offload.load_model_data(model, write(tmp_path / "x.safetensors", sd), default_dtype=torch.float32)
    kinds = [type(layer).__name__ for layer in (model.a, model.b, model.c, model.d)]
    assert kinds == ["QLinearDemo4", "QuantLinear", "QuantLinear", "Linear"]
    assert model.a.kind is handler.demo4
    x = torch.randn(2, 32)
    want = x
    for name in "abcd":
        want = F.linear(want, numbers[name], sd[f"{name}.bias"])
    assert torch.equal(model(x), want)
    # Detection has seen names, types and shapes, and no data.
    assert handler.seen and all(device == "meta" for device, *_ in handler.seen[0].values())
    assert handler.seen[0]["a.weight"] == ("meta", torch.uint8, (32, 16))


def test_a_handler_splits_fused_weights_of_its_format(handler: Any) -> None:
    parts, numbers = demo_parts(48, 32, "attn.qkv")
    sd = {**parts, "attn.qkv.bias": torch.randn(48)}
    model = nn.ModuleDict({"attn": nn.ModuleDict({key: nn.Linear(32, 16, device="meta") for key in "qkv"})})
    split = {"qkv": {"mapped_modules": ["q", "k", "v"], "split_sizes": [16, 16, 16]}}
    offload.load_model_data(model, sd, fused_split_map=split, default_dtype=torch.float32)
    x = torch.randn(2, 32)
    for at, key in enumerate("qkv"):
        rows = slice(16 * at, 16 * at + 16)
        assert torch.equal(model["attn"][key](x), F.linear(x, numbers[rows], sd["attn.qkv.bias"][rows])), key
    del handler.split_fused_weights
    model = nn.ModuleDict({"attn": nn.ModuleDict({key: nn.Linear(32, 16, device="meta") for key in "qkv"})})
    with pytest.raises(
        QuantizationError, match=r"attn\.qkv is fused, and the handler demo4 has no split_fused_weights"
    ):
        offload.load_model_data(model, sd, fused_split_map=split)


def test_all_handlers_are_one_list_by_priority(handler: Any) -> None:
    names = [name for name, _ in quant_router.handlers()]
    priorities = [priority for _, priority in quant_router.handlers()]
    assert priorities == sorted(priorities)
    assert names.index("torchao") < names.index("demo4") < names.index("fp8")
    assert quant_router.unregister_handler("demo4") and not quant_router.unregister_handler("demo4")
    assert "demo4" not in [name for name, _ in quant_router.handlers()]


def to_qint8(name: str, priority: int, times: float = 1.0) -> types.SimpleNamespace:
    """A handler for FP8 with scales that makes quanto's qint8 of it."""

    def detect(state_dict: dict[str, Tensor], verboseLevel: int = 1) -> dict[str, Any]:
        found = [key[:-13] for key in state_dict if key.endswith(".weight_scale")]
        return {"matched": bool(found), "kind": name, "details": {"modules": found}}

    def convert_to_quanto(
        state_dict: dict[str, Tensor], default_dtype: torch.dtype, verboseLevel: int, detection: dict[str, Any]
    ) -> dict[str, Any]:
        sd, quant_map = dict(state_dict), {}
        for module in detection["details"]["modules"]:
            numbers = sd.pop(f"{module}.weight").float() * sd.pop(f"{module}.weight_scale") * times
            scale = numbers.abs().amax(1, keepdim=True) / 127
            sd[f"{module}.weight._data"] = (numbers / scale).round().to(torch.int8)
            sd[f"{module}.weight._scale"] = scale
            quant_map[module] = {"weights": "qint8", "activations": "none"}
        return {"state_dict": sd, "quant_map": quant_map}

    return types.SimpleNamespace(
        detect=detect, convert_to_quanto=convert_to_quanto, HANDLER_NAME=name, HANDLER_PRIORITY=priority
    )


@pytest.mark.parametrize(
    ("name", "priority", "format"),
    [
        ("mine", 1, "quanto qint8 with a scale a row"),  # better than the built-in one
        ("mine", 500, "FP8 with one scale"),  # worse
        ("mine", 10, "FP8 with one scale"),  # as good: the built-in one
        ("fp8", 500, "quanto qint8 with a scale a row"),  # in its place
    ],
)
def test_on_a_clash_the_better_priority_has_the_module(name: str, priority: int, format: str) -> None:
    sd = {**fp8_parts(16, 32, "0.weight"), "0.bias": torch.zeros(16)}
    model = nn.Sequential(nn.Linear(32, 16, device="meta"))
    quant_router.register_handler(to_qint8(name, priority))
    try:
        offload.load_model_data(model, sd, default_dtype=torch.float32)
    finally:
        assert quant_router.unregister_handler(name)
    assert isinstance(model[0], QuantLinear) and model[0].format == format
    torch.testing.assert_close(model[0].weight + 0, int8_numbers(sd, "0.weight"), rtol=0.01, atol=0.02)


def test_of_two_handlers_the_better_one_has_the_module() -> None:
    sd = fp8_parts(16, 32, "0.weight")
    model = nn.Sequential(nn.Linear(32, 16, bias=False, device="meta"))
    for name, priority, times in (("second", 3, 5.0), ("first", 2, 2.0)):
        quant_router.register_handler(to_qint8(name, priority, times))
    try:
        offload.load_model_data(model, sd, default_dtype=torch.float32)
    finally:
        quant_router.unregister_handler("first")
        quant_router.unregister_handler("second")
    torch.testing.assert_close(model[0].weight + 0, int8_numbers(sd, "0.weight") * 2, rtol=0.01, atol=0.04)


def test_what_a_handler_does_wrong_names_it(handler: Any, tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match="has no convert_to_quanto"):
        quant_router.register_handler(types.SimpleNamespace(detect=lambda sd: {}, HANDLER_NAME="half"))
    sd, _ = mixed()
    handler.convert_to_quanto = lambda state_dict, **_: 1 / 0
    model = Net()
    with pytest.raises(QuantizationError, match="convert_to_quanto of the handler demo4 failed: ZeroDivisionError"):
        offload.load_model_data(model, sd)
    handler.convert_to_quanto = lambda state_dict, **_: {"state_dict": state_dict, "quant_map": {"z": "demo4"}}
    with pytest.raises(QuantizationError, match="'z' in its map and no tensor"):
        offload.load_model_data(model, sd)
    assert all(type(layer) is nn.Linear for layer in model.children())


def test_a_handler_that_puts_its_modules_in_itself_is_let() -> None:
    done = []

    def apply_pre_quantization(
        model: nn.Module,
        state_dict: dict[str, Tensor],
        quantization_map: dict[str, Any],
        default_dtype: Any,
        verboseLevel: int,
    ) -> tuple[dict[str, Any], list[Any]]:
        for module in quantization_map:
            numbers = state_dict[f"{module}.weight._data"].float() * state_dict[f"{module}.weight._scale"]
            model.get_submodule(module).weight = nn.Parameter(numbers, requires_grad=False)
        return {}, [lambda: done.append(True)]

    one = to_qint8("whole", 1)
    one.apply_pre_quantization = apply_pre_quantization
    convert = one.convert_to_quanto
    one.convert_to_quanto = lambda **given: {
        **(made := convert(**given)),
        "quant_map": {name: {"weights": "own"} for name in made["quant_map"]},
    }
    one.convert_to_quanto = lambda state_dict, default_dtype, verboseLevel, detection: {
        **(made := convert(state_dict, default_dtype, verboseLevel, detection)),
        "quant_map": {name: {"weights": "own"} for name in made["quant_map"]},
    }
    quant_router.register_handler(one)
    sd = fp8_parts(16, 32, "0.weight")
    model = nn.Sequential(nn.Linear(32, 16, bias=False, device="meta"))
    try:
        offload.load_model_data(model, sd, default_dtype=torch.float32)
    finally:
        quant_router.unregister_handler("whole")
    assert type(model[0]) is nn.Linear and done == [True]
    torch.testing.assert_close(model[0].weight.detach(), int8_numbers(sd, "0.weight"), rtol=0.01, atol=0.02)


def test_files_of_another_type_are_read_by_their_handler(tmp_path: Path) -> None:
    sd = {**int8_parts(16, 32, "0.weight"), "0.bias": torch.zeros(16)}
    torch.save(sd, tmp_path / "model.bin4")
    asked: dict[str, Any] = {}

    def load_state_dict(
        path: str, writable_tensors: bool, verboseLevel: int, default_dtype: Any, pin_to_memory: bool
    ) -> Any:
        asked["path"] = path
        return torch.load(path, weights_only=True), {}, {}

    reader = types.SimpleNamespace(
        load_state_dict=load_state_dict,
        normalize=lambda path: path.replace("MODEL", "model"),
        get_file_metadata=lambda path: {"config": {"width": 32}},
    )
    quant_router.register_file_extension(".bin4", reader)
    try:
        model = nn.Sequential(nn.Linear(32, 16, device="meta"))
        offload.load_model_data(model, tmp_path / "MODEL.BIN4".replace("BIN4", "bin4"), default_dtype=torch.float32)
        made = offload.fast_load_transformers_model(
            tmp_path / "model.bin4",
            modelClass=lambda width: nn.Sequential(nn.Linear(width, 16)),
            default_dtype=torch.float32,
        )
    finally:
        assert quant_router.unregister_file_extension("bin4")
    assert asked["path"] == str(tmp_path / "model.bin4")
    for one in (model, made):
        assert isinstance(one[0], QuantLinear) and torch.equal(one[0].weight + 0, int8_numbers(sd, "0.weight"))


def test_questions_about_files_read_headers_only(tmp_path: Path, handler: Any) -> None:
    path = write(tmp_path / "x.safetensors", {**fp8_parts(16, 32, "0.weight"), "1.weight": torch.ones(2, 2)})
    found = quant_router.detect(path)
    assert {name: weight.format for name, weight in found.items()} == {"0.weight": "FP8 with one scale"}
    assert quant_router.detect_quantization_kind_for_file(path) == "fp8"
    assert (
        quant_router.detect_quantization_kind_for_file(write(tmp_path / "y.safetensors", {"a": torch.ones(2)})) is None
    )
    handler.detect_quantization_kind_for_file = lambda path, verboseLevel=1: "mine"
    handler.detect_quantization_label_from_filename = lambda filename: "Demo4" if "demo4" in filename else ""
    assert quant_router.detect_quantization_kind_for_file(path) == "mine"
    assert quant_router.detect_quantization_label_from_filename("model_demo4.safetensors") == "Demo4"
    assert quant_router.detect_quantization_label_from_filename("model.safetensors") == ""
