"""Quantized layers: the numbers of every format, and all that a layer of PyTorch's does besides."""

from __future__ import annotations

import copy
import os
import pickle
import threading

import pytest
import torch
from quant_files import Blocks, corpus, fp8_parts, int8_linear, int8_numbers, int8_parts, only, steps_apart
from torch import nn
from torch.nn import functional as F

import weightstream
from weightstream import QuantizationError, StateError, offload
from weightstream.quant import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantEmbedding,
    QuantLinear,
    QuantWeight,
    dequantize,
)
from weightstream.quant.expressions import expression
from weightstream.quant.native_products import _cpu_has_int8
from weightstream.quant.description import as_bytes, described

FILES = (
    "awq", "bnb", "fp8", "fp8-plain", "gptq", "gptq-v2", "int8", "mxfp8", "nunchaku", "nvfp4", "nvfp4-compressed-tensors",
    "nvfp4-modelopt", "quanto", "torchao", "w4a8",
)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_weights_of_every_format_equal_their_reference(name: str) -> None:
    found, expected, ulps = corpus(name)
    assert set(found.packed) == set(expected)
    for packed in found.packed.values():
        want = expected[packed.name].reshape(packed.shape)
        parts = [packed.parts[tensor] for _, tensor, *_ in packed.weight.parts]
        have = dequantize(packed.weight, parts)
        assert have.shape == packed.shape and steps_apart(have, want) <= ulps, packed.name
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            small = dequantize(packed.weight, parts, dtype)
            assert torch.equal(small.nan_to_num(7), have.to(dtype).nan_to_num(7)), (packed.name, dtype)


@pytest.mark.parametrize("name", FILES)
def test_pytorchs_expression_gives_the_same_bits(name: str) -> None:
    found, _, _ = corpus(name)
    for packed in found.packed.values():
        parts = [as_bytes(packed.parts[tensor]) for _, tensor, *_ in packed.weight.parts]
        numbers = expression(described(packed.weight.to_json()), parts)
        if numbers is not None:
            have = dequantize(packed.weight, [packed.parts[tensor] for _, tensor, *_ in packed.weight.parts])
            assert torch.equal(numbers.nan_to_num(7), have.nan_to_num(7)), packed.name


@pytest.mark.parametrize("name", FILES)
def test_a_linear_layer_of_every_format_computes_saves_and_loads(name: str) -> None:
    found, _, _ = corpus(name)
    for packed in found.packed.values():
        if len(packed.shape) != 2 or 0 in packed.shape:
            continue
        arguments = {"dtype": torch.float32, "hints": packed.hints, "metadata": packed.metadata}
        layer = QuantLinear.from_parts(packed.weight, packed.parts, **arguments)
        x = torch.randn(3, layer.in_features)
        weight = layer.weight + 0
        if not packed.weight.transforms:
            assert torch.equal(layer(x).nan_to_num(7), F.linear(x, weight).nan_to_num(7)), packed.name
        saved = layer.state_dict()
        for tensor, part in packed.parts.items():
            assert saved[tensor].dtype == part.dtype and saved[tensor].shape == part.shape, (packed.name, tensor)
        empty = {key: torch.zeros_like(part) for key, part in packed.parts.items()}
        other = QuantLinear.from_parts(packed.weight, empty, hints=packed.hints)
        other.load_state_dict(saved)
        assert torch.equal((other.weight + 0).nan_to_num(7), (layer.weight.bfloat16()).nan_to_num(7)), packed.name


def test_rotated_inputs_meet_rotated_weights() -> None:
    found, expected, _ = corpus("rotation")
    assert found.packed
    for packed in found.packed.values():
        layer = QuantLinear.from_parts(packed.weight, packed.parts, dtype=torch.float32)
        assert packed.weight.transforms
        x = torch.randn(4, layer.in_features)
        # What looks at the weight sees the one that plain inputs meet.
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight + 0), rtol=1e-4, atol=1e-4)


def test_types_of_inputs_autocast_and_conversions() -> None:
    layer = int8_linear(32, 64, bias=True)
    parts = int8_parts(32, 64)
    x = torch.randn(2, 64)
    assert layer(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for convert in (nn.Module.half, nn.Module.bfloat16, lambda m: m.to(torch.float64), nn.Module.float):
        convert(layer)
        assert layer.weight.dtype == layer.bias.dtype == layer.compute_dtype
        saved = layer.state_dict()
        assert torch.equal(saved["weight"], parts["weight"]) and torch.equal(
            saved["weight_scale"], before["weight_scale"]
        )
    layer.bfloat16()
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(layer.weight + 0, int8_numbers(parts).bfloat16())


def test_shapes_are_known_without_data() -> None:
    layer = int8_linear(32, 64, bias=True).to("meta")
    assert layer(torch.randn(2, 64, device="meta")).shape == (2, 32)
    assert layer.weight.is_meta and layer.weight.shape == (32, 64)


def test_fp8_weights_do_not_become_the_type_of_the_model() -> None:
    packed = only(fp8_parts(32, 32))
    layer = QuantLinear.from_parts(packed.weight, packed.parts)
    assert not any(parameter.is_floating_point() for parameter in layer.parameters())
    assert layer.state_dict()["weight"].dtype == torch.float8_e4m3fn


def test_embedding_looks_up_rows() -> None:
    packed = only(int8_parts(50, 16))
    layer = QuantEmbedding.from_parts(packed.weight, packed.parts, dtype=torch.float32)
    index = torch.tensor([[3, 4, 5], [49, 0, 3]])
    assert torch.equal(layer(index), F.embedding(index, int8_numbers(packed.parts)))
    assert layer(index[:0]).shape == (0, 3, 16)
    with pytest.raises(IndexError, match="row 50"):
        layer(torch.tensor([50]))


@pytest.mark.parametrize(
    ("conv", "quant"), [(nn.Conv1d, QuantConv1d), (nn.Conv2d, QuantConv2d), (nn.Conv3d, QuantConv3d)]
)
def test_convolutions(conv: type[nn.Module], quant: type[nn.Module]) -> None:
    plain = conv(8, 6, 3, stride=2, padding=1, groups=2, padding_mode="replicate")
    shape = plain.weight.shape
    data = torch.randint(-127, 128, shape, dtype=torch.int8)
    parts = {"weight": data, "weight_scale": torch.rand(6, 1) / 50}
    packed = only(parts)
    layer = quant.from_parts(packed.weight, packed.parts, plain.bias, like=plain, dtype=torch.float32)
    numbers = data.float() * parts["weight_scale"].view(6, *[1] * (len(shape) - 1))
    with torch.no_grad():
        plain.weight.copy_(numbers)
    x = torch.randn(1, 8, *[9] * (len(shape) - 2))
    assert torch.equal(layer(x), plain(x))


def test_the_weight_can_be_looked_at_and_not_written() -> None:
    layer = int8_linear(8, 16)
    weight = layer.weight
    assert weight.shape == (8, 16) and weight.dtype == torch.float32 and weight.device.type == "cpu"
    assert torch.equal(weight.t() @ weight, (weight + 0).t() @ (weight + 0))
    assert torch.equal(torch.linalg.norm(weight, dim=1), torch.linalg.norm(weight + 0, dim=1))
    for write in (
        lambda: weight.data.add_(1),
        lambda: weight.copy_(weight),
        lambda: weight.zero_(),
        lambda: nn.init.zeros_(layer.weight),
    ):
        with pytest.raises(StateError, match="quantized layer"):
            write()
    with pytest.raises(StateError, match="layer of floats"):
        layer.weight = nn.Parameter(torch.zeros(8, 16))


def test_a_tied_layer_has_the_same_parameters() -> None:
    packed = only(int8_parts(20, 16))
    embedding = QuantEmbedding.from_parts(packed.weight, packed.parts, dtype=torch.float32)
    head = int8_linear(20, 16, seed=9)
    head.weight = embedding.weight
    assert head.quant_data is embedding.quant_data and len(list(nn.ModuleList([embedding, head]).parameters())) == 2
    x = torch.randn(1, 16)
    assert torch.equal(head(x), F.linear(x, embedding.weight + 0))


def test_copies_and_pickles() -> None:
    layer = int8_linear(8, 16, bias=True)
    x = torch.randn(2, 16)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))
    assert pickle.loads(pickle.dumps(layer.quant_weight)) == layer.quant_weight


class Doubled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_layer_of_a_subclass_is_pickled_by_the_class_it_was_made_of(protocol: int) -> None:
    model = nn.Sequential(*(Doubled(16, 16) for _ in range(5)))
    offload.quantize(model)
    layer = model[0]
    assert isinstance(layer, Doubled) and isinstance(layer, QuantLinear)
    x = torch.randn(2, 16)
    again = pickle.loads(pickle.dumps(layer, protocol))
    assert type(again) is type(layer) and torch.equal(again(x), layer(x))
    derived = type("Derived", (type(layer),), {})
    layer.__class__ = derived
    assert type(copy.deepcopy(layer)) is derived


def test_gradients_reach_inputs_and_not_packed_numbers() -> None:
    layer = int8_linear(8, 16)
    x = torch.randn(2, 16, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, (layer.weight + 0).sum(0).expand(2, 16))
    with pytest.raises(StateError, match="adapter"):
        layer.weight.requires_grad_()


@pytest.mark.parametrize("rotated", [False, True])
def test_compiled_in_one_graph(rotated: bool) -> None:
    if rotated:
        packed = next(iter(corpus("rotation")[0].packed.values()))
        layer = QuantLinear.from_parts(packed.weight, packed.parts, dtype=torch.float32)
    else:
        layer = int8_linear(16, 32, bias=True)
    x = torch.randn(3, layer.in_features)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
    exported = torch.export.export(layer, (x,)).module()
    assert torch.equal(exported(x), layer(x))


def test_an_embedding_is_compiled_too() -> None:
    packed = only(int8_parts(20, 16))
    layer = QuantEmbedding.from_parts(packed.weight, packed.parts)
    index = torch.tensor([[1, 2]])
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(index), layer(index))


def test_operators_are_what_pytorch_takes_them_for() -> None:
    layer = int8_linear(8, 16)
    torch.library.opcheck(
        torch.ops.weightstream.dequantize.default, (layer._quant_parts(), layer.quant_text, torch.float32)
    )
    torch.library.opcheck(
        torch.ops.weightstream.dequantize_rows.default,
        (layer._quant_parts(), layer.quant_text, torch.tensor([1, 5]), torch.bfloat16),
    )
    torch.library.opcheck(torch.ops.weightstream.rotate.default, (torch.randn(2, 32, requires_grad=True), 16))


def test_native_products_are_opt_in_and_near() -> None:
    layer = int8_linear(64, 128, bias=True)
    x = torch.randn(32, 128)
    exact = layer(x)
    layer.native_products = True
    near = layer(x)
    assert not torch.equal(near, exact) or not _cpu_has_int8()
    # Half a step of the inputs in each of 128 products.
    bound = (x.abs().amax(1, keepdim=True) / 127 / 2) * (layer.weight + 0).abs().sum(1)
    assert bool(((near - exact).abs() <= bound * 1.01 + 1e-4).all())
    narrow = int8_linear(10, 24)
    narrow.native_products = True
    x = torch.randn(2, 24)
    assert torch.equal(narrow(x), F.linear(x, narrow.weight + 0))


def test_parts_that_do_not_fit_are_refused_by_name() -> None:
    parts = int8_parts(8, 16, "blocks.3.fc.weight")
    packed = only(parts)
    with pytest.raises(QuantizationError, match="is made of"):
        QuantLinear.from_parts(packed.weight, {"weight": packed.parts["weight"]})
    with pytest.raises(QuantizationError, match="weight.* has 64 bytes and needs 128"):
        QuantLinear.from_parts(packed.weight, {**packed.parts, "weight": packed.parts["weight"][:4]})
    with pytest.raises(QuantizationError, match="2 dimensions"):
        conv = only({"weight": torch.zeros(4, 2, 3, dtype=torch.int8), "weight_scale": torch.ones(4, 1)})
        QuantLinear.from_parts(conv.weight, conv.parts)
    with pytest.raises(QuantizationError, match="cannot be read"):
        QuantWeight.from_json('{"name": "a"}')


def test_many_threads_dequantize_at_once() -> None:
    layer = int8_linear(64, 64)
    x = torch.randn(4, 64)
    expected, wrong = layer(x), []

    def run() -> None:
        for _ in range(50):
            if not torch.equal(layer(x), expected):
                wrong.append(True)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_dequantizes() -> None:
    layer = int8_linear(300, 300)
    x = torch.randn(1, 300)
    expected = layer(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(layer(x), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("budget", [None, "150KiB", "100KiB"])
def test_streamed_packed_bytes_give_the_same_bits(budget: str | None) -> None:
    model = Blocks()
    packed = sum(parameter.nbytes for parameter in model.parameters())
    x = torch.randn(3, 128)
    with torch.inference_mode():
        expected = model(x)
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        device = weightstream.HostDevice(granularity=4096, poison=True)
        with weightstream.attach(model, device=device, budget=budget) as attachment:
            for _ in range(4):
                assert torch.equal(model(x), expected)
            # Packed bytes are what there is to place: a quarter of the floats.
            assert packed <= attachment.report()["model_bytes"] <= packed + 512 * len(list(model.parameters()))
            assert torch.equal(model.blocks[4][0].weight + 0, Blocks().blocks[4][0].weight + 0)
            attached = model.state_dict()
            assert all(torch.equal(attached[name], tensor) for name, tensor in saved.items())
            if budget is not None:
                assert attachment.report()["streamed_bytes_per_step"] > 0
        assert torch.equal(model(x), expected)


def test_compiled_blocks_stream_packed_bytes() -> None:
    model, resident = Blocks(), Blocks()
    for blocks in (model.blocks, resident.blocks):
        for block in blocks:
            block.compile(backend="aot_eager")
    x = torch.randn(3, 128)
    with torch.inference_mode():
        expected = resident(x)
        device = weightstream.HostDevice(granularity=4096, poison=True)
        with weightstream.attach(model, device=device, budget="150KiB") as attachment:
            for _ in range(4):
                assert torch.equal(model(x), expected)
            assert attachment.report()["streamed_bytes_per_step"] > 0


def test_an_adapter_of_peft_goes_on_top() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential(int8_linear(16, 16, bias=True), nn.ReLU(), int8_linear(16, 16, seed=3))
    x = torch.randn(2, 16)
    expected = model(x)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0", "2"], r=4, init_lora_weights=False))
    layer = wrapped.base_model.model[0]
    adapted = wrapped(x)
    assert not torch.equal(adapted, expected)
    base = layer.base_layer
    delta = layer.lora_B["default"](layer.lora_A["default"](x)) * layer.scaling["default"]
    torch.testing.assert_close(layer(x), base(x) + delta)
    with wrapped.disable_adapter():
        assert torch.equal(wrapped(x), expected)
