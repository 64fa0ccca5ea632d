"""Quantized layers on a GPU: the numbers of the CPU, streamed too, compiled too, and products with weights as they are."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from quant_files import Blocks, corpus, fp8_parts, int8_linear, int8_numbers, int8_parts, only
from torch.nn import functional as F

import weightstream
from weightstream import offload
from weightstream.quant import QuantEmbedding, QuantizationNote, QuantLinear, dequantize

pytestmark = pytest.mark.gpu

FILES = (
    "awq", "bnb", "compressed-tensors-int", "fp8", "fp8-plain", "gptq", "gptq-3bit", "gptq-v2", "int8", "mxfp8", "nunchaku", "nvfp4",
    "nvfp4-compressed-tensors", "nvfp4-modelopt", "quanto", "torchao", "w4a8", "rotation",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", FILES)
def test_numbers_of_every_format_are_those_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    found, _, _ = corpus(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationNote)  # of formats and types without a kernel
        for packed in found.packed.values():
            parts = [packed.parts[tensor] for _, tensor, *_ in packed.weight.parts]
            have = dequantize(packed.weight, [part.cuda() for part in parts], dtype)
            want = dequantize(packed.weight, parts, dtype)
            assert have.is_cuda and have.shape == packed.shape
            if "SVDQuant" in packed.weight.format and dtype in (torch.bfloat16, torch.float16):
                # Matrix instructions add the narrow matrices: within a step, or what terms that cancel leave open.
                step = torch.finfo(dtype).eps
                torch.testing.assert_close(
                    have.cpu(), want, rtol=step, atol=float(want.abs().max()) / (1 << 20), equal_nan=True
                )
                continue
            assert torch.equal(have.cpu().nan_to_num(7), want.nan_to_num(7)), packed.name


def test_a_layer_computes_what_its_numbers_do() -> None:
    layer = int8_linear(256, 128, bias=True, dtype=torch.bfloat16).cuda()
    x = torch.randn(5, 128, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(layer(x), F.linear(x, layer.weight + 0, layer.bias))
    assert layer.weight.device.type == "cuda"
    packed = only(int8_parts(50, 16))
    embedding = QuantEmbedding.from_parts(packed.weight, packed.parts, dtype=torch.float32).cuda()
    index = torch.tensor([[3, 49], [0, 3]], device="cuda")
    assert torch.equal(embedding(index).cpu(), F.embedding(index.cpu(), int8_numbers(packed.parts)))


@pytest.mark.parametrize("compiled", [False, True])
def test_streamed_packed_bytes_give_the_bits_of_resident_ones(compiled: bool) -> None:
    resident, streamed = Blocks(12, 512).cuda(), Blocks(12, 512)
    x = torch.randn(3, 512, device="cuda")
    if compiled:
        for model in (resident, streamed):
            for block in model.blocks:
                block.compile()
    with torch.inference_mode():
        expected = resident(x)
        with weightstream.attach(streamed, device="cuda", budget="4MiB") as attachment:
            for _ in range(4):
                assert torch.equal(streamed(x), expected)
            assert attachment.report()["streamed_bytes_per_step"] > 0


def test_one_graph_on_the_device() -> None:
    layer = int8_linear(64, 64, bias=True).cuda()
    x = torch.randn(3, 64, device="cuda")
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_products_with_weights_as_they_are_come_near(kind: str) -> None:
    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8 products")
    packed = only((int8_parts if kind == "int8" else fp8_parts)(256, 512))
    layer = QuantLinear.from_parts(packed.weight, packed.parts, dtype=torch.bfloat16).cuda()
    x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    exact = layer(x).double()
    layer.native_products = True
    near = layer(x).double()
    # What the product should be: inputs rounded row by row to the weight's type, the rest in float64.
    step = x.double().abs().amax(1, keepdim=True) / (127 if kind == "int8" else 448)
    codes = x.double() / step
    codes = codes.round() if kind == "int8" else codes.to(torch.float8_e4m3fn).double()
    whole = QuantLinear.from_parts(packed.weight, packed.parts, dtype=torch.float32)
    want = codes * step @ whole.weight.numbers().double().t().cuda()
    assert float((near - want).norm() / want.norm()) < 1 / 256, "rounded once to bfloat16"
    assert float((near - exact).norm() / exact.norm()) < (1 / 64 if kind == "int8" else 1 / 16)
    assert not torch.equal(near, exact)


def test_rotated_inputs_meet_rotated_weights_on_the_device() -> None:
    packed = next(iter(corpus("rotation")[0].packed.values()))
    layer = QuantLinear.from_parts(packed.weight, packed.parts, dtype=torch.float32)
    x = torch.randn(4, layer.in_features)
    want = layer(x)
    torch.testing.assert_close(layer.cuda()(x.cuda()).cpu(), want, rtol=1e-3, atol=1e-3)
    # A sum near zero may keep few right digits, so that steps of it are no measure.
    torch.testing.assert_close(layer.weight.numbers().cpu(), layer.cpu().weight.numbers(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["qint8", "qfloat8", "qint4"])
def test_a_model_on_the_gpu_is_quantized_there_to_the_numbers_of_the_cpu(kind: str) -> None:
    torch.manual_seed(0)
    here = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(6))).bfloat16()
    there = copy.deepcopy(here).cuda()
    assert offload.quantize(there, kind) == offload.quantize(here, kind)
    for one, other in zip(here, there):
        assert isinstance(other, QuantLinear) and all(part.is_cuda for part in other.quant_parts().values())
        assert torch.equal(one.weight + 0, (other.weight + 0).cpu())


def test_a_pipeline_on_the_gpu_is_quantized_and_streams() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).bfloat16()
    resident = copy.deepcopy(model)
    offload.quantize(resident)
    x = torch.randn(3, 512, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode(), offload.profile({"transformer": model.cuda()}, 5):
        assert torch.equal(model(x), resident.cuda()(x))
