"""GGUF files: raw quantized streaming generates the tokens that the weights give which the `gguf` package dequantizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from quant_gguf import GEMMA, QWEN, SMOLLM2, RealModel, dequantized, file_of
from torch import Tensor, nn

import weightstream
from weightstream import ConfigError, QuantizationError, WeightsError, offload
from weightstream.quant import QuantEmbedding, QuantLinear, QuantModule, dequantize
from weightstream.quant.description import described
from weightstream.quant.finding import find
from weightstream.quant.selecting import selected


def generated(model: Any, prompt: tuple[int, ...], tokens: int) -> Tensor:
    return model.generate(
        torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
    )


@pytest.mark.parametrize("real", [SMOLLM2, QWEN, GEMMA], ids=lambda real: real.name)
def test_streamed_blocks_generate_what_dequantized_weights_do(real: RealModel, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = file_of(real, tmp_path)
    model = offload.fast_load_transformers_model(path, default_dtype=real.dtype)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert linear and all(isinstance(module, QuantLinear) for module in linear)
    assert isinstance(model.get_input_embeddings(), QuantEmbedding)
    reference = type(model)(model.config).eval()
    for parameter in reference.parameters():  # buffers, such as rotary frequencies, keep their type
        parameter.data = parameter.data.to(real.dtype)
    reference.load_state_dict(dequantized(real, path, reference), strict=False)
    reference.tie_weights()
    with torch.inference_mode():
        index = torch.tensor([real.prompt])
        assert torch.equal(model(index).logits, reference(index).logits)
        expected = generated(reference, real.prompt, 5)
        del reference
        with weightstream.attach(model, device="host", budget=real.budget) as attachment:
            assert torch.equal(generated(model, real.prompt, 5), expected)
            report = attachment.report()
            # Packed bytes are what is placed and streamed.
            packed = sum(parameter.nbytes for parameter in model.parameters())
            assert packed <= report["model_bytes"] < packed * 1.02
            assert 0 < report["streamed_bytes_per_step"] < packed
            assert packed < path.stat().st_size
        assert torch.equal(model(index).logits[0, -1].argmax(), expected[0, len(real.prompt)])


def test_a_saved_gguf_model_is_the_same_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = file_of(SMOLLM2, tmp_path)
    model = offload.fast_load_transformers_model(path, default_dtype=torch.float32)
    offload.save_model(model, tmp_path / "x.safetensors")
    again = offload.fast_load_transformers_model(tmp_path / "x.safetensors", default_dtype=torch.float32)
    assert again.lm_head.quant_data is again.model.embed_tokens.quant_data
    layers = [name for name, module in model.named_modules() if isinstance(module, QuantModule)]
    for name in layers:
        one, two = model.get_submodule(name), again.get_submodule(name)
        assert one.quant_text == two.quant_text and torch.equal(one.quant_data, two.quant_data), name
    _, kinds, _ = offload.load_sd(tmp_path / "x.safetensors")
    assert {kind["weights"] for kind in kinds.values()} == {"Q4_1", "Q8_0"}


MEASURE = """
import sys
from pathlib import Path
import torch
from transformers import LlamaForCausalLM
from weightstream import offload

def memory(key):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)) << 10

LlamaForCausalLM  # what importing takes is none of the load's
before = memory("VmRSS")
model = offload.fast_load_transformers_model(sys.argv[1])
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_4_bit_file_loads_within_its_size_and_a_block(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = file_of(SMOLLM2, tmp_path)
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    # Both counted generously: pages of the file that are read count as the process's, and so does what building takes.
    block, slack = 4 << 20, 24 << 20
    assert int(done.stdout.split()[-1]) <= path.stat().st_size + block + slack


def blocks(kind: str, rows: int, columns: int, seed: int = 0) -> tuple[Any, Tensor]:
    """A quantized matrix as the `gguf` package makes it, and its numbers."""
    gguf: Any = pytest.importorskip("gguf")
    numbers = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).numpy()
    packed = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind])
    return packed, torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind]).copy())


def gguf_file(path: Path, tensors: dict[str, Any], values: dict[str, Any], architecture: str = "flux") -> Path:
    gguf: Any = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        writer.add_array(key, value) if isinstance(value, list) else writer.add_uint32(key, value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=None if kind is None else gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Image(nn.Module):
    """What files of image models keep in other shapes than the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 96, bias=False)
        self.lin = nn.Linear(64, 64, bias=False)
        self.pad_token = nn.Parameter(torch.zeros(1, 16))


def test_true_shapes_are_restored_and_a_missing_leading_one_is_added(tmp_path: Path) -> None:
    first = torch.randn(96, 64)
    packed, numbers = blocks("Q8_0", 64, 64)
    tensors = {
        "model.diffusion_model.first.weight": (first.view(24, 256).numpy(), None),
        "model.diffusion_model.lin.weight": (packed, "Q8_0"),
        "model.diffusion_model.pad_token": (torch.arange(16.0).numpy(), None),
    }
    values = {"comfy.gguf.orig_shape.model.diffusion_model.first.weight": [96, 64]}
    model = Image()
    offload.load_model_data(model, gguf_file(tmp_path / "x.gguf", tensors, values), default_dtype=torch.float32)
    assert torch.equal(model.first.weight, first) and torch.equal(model.lin.weight + 0, numbers)
    assert model.lin.quant_data.shape == (64, 68) and model.lin.weight.shape == (64, 64)
    assert torch.equal(model.pad_token, torch.arange(16.0).view(1, 16))
    assert any("pad_token" in note for note in model._weightstream_load["notes"])


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (8, 32, 3, 3), (4, 8, 9), (2, 2, 2, 4, 9)])
def test_blocks_of_a_flattened_convolution_are_all_there_in_its_true_shape(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    elements = torch.Size(shape).numel()
    packed, numbers = blocks("Q8_0", elements // 32, 32)
    path = gguf_file(
        tmp_path / "x.gguf", {"conv.weight": (packed, "Q8_0")}, {"comfy.gguf.orig_shape.conv.weight": list(shape)}
    )
    sd, kinds, _ = offload.load_sd(path)
    assert sd["conv.weight"].nbytes == packed.nbytes and kinds == {"conv": {"weights": "Q8_0", "activations": "none"}}
    assert sd.quantized()["conv.weight"].shape == list(shape)
    held = {4: nn.Conv2d, 3: nn.Conv1d}.get(len(shape))
    if held is None:
        model = nn.ModuleDict({"conv": nn.Module()})
        model["conv"].weight = nn.Parameter(torch.zeros(shape))
    else:
        model = nn.ModuleDict({"conv": held(shape[1], shape[0], shape[2:], bias=False)})
    offload.load_model_data(model, path, default_dtype=torch.float32)
    assert torch.equal(model["conv"].weight + 0, numbers.view(shape))
    if len(shape) == 4:
        image = torch.randn(1, shape[1], 5, 5)
        assert torch.equal(model["conv"](image), nn.functional.conv2d(image, numbers.view(shape)))
    wrong = nn.ModuleDict({"conv": nn.Linear(elements // shape[0], shape[0], bias=False)})
    with pytest.raises(QuantizationError) as refused:
        offload.load_model_data(wrong, path)
    linear = [shape[0], elements // shape[0]]
    assert str(refused.value) == f"conv.weight, Q8_0, has the shape {list(shape)} in the file and {linear} in the model"


def test_names_of_a_language_model_are_found_and_missing_numbers_named(tmp_path: Path) -> None:
    packed, _ = blocks("Q8_0", 64, 64)
    path = gguf_file(tmp_path / "x.gguf", {"token_embd.weight": (packed, "Q8_0")}, {}, "llama")
    with pytest.raises(ConfigError, match="says nothing of hidden_size"):
        offload.fast_load_transformers_model(path)
    tensors = {"blk.0.attn_q.weight": (packed, "Q8_0")}
    path = gguf_file(tmp_path / "y.gguf", tensors, {"llama.attention.head_count": 5}, "llama")
    model = nn.ModuleDict({"model": nn.Linear(1, 1)})
    with pytest.raises(QuantizationError, match="no pairs of 5 heads"):
        offload.load_model_data(model, path)


def test_a_matrix_of_another_shape_is_refused(tmp_path: Path) -> None:
    packed, _ = blocks("Q8_0", 64, 32)
    model = nn.ModuleDict({"lin": nn.Linear(64, 64, bias=False, device="meta")})
    with pytest.raises((QuantizationError, WeightsError), match=r"lin\.weight.*\[64, 32\].*\[64, 64\]"):
        offload.load_model_data(model, gguf_file(tmp_path / "x.gguf", {"lin.weight": (packed, "Q8_0")}, {}))


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0"])
def test_a_fused_matrix_of_blocks_is_split_and_takes_an_adapter(tmp_path: Path, kind: str) -> None:
    packed, numbers = blocks(kind, 96, 64)
    path = gguf_file(tmp_path / "x.gguf", {"attn.qkv.weight": (packed, kind)}, {})
    model = nn.ModuleDict({"attn": nn.ModuleDict({key: nn.Linear(64, 32, bias=False, device="meta") for key in "qkv"})})
    offload.load_model_data(model, path, fused_split_map={"qkv": ["q", "k", "v"]}, default_dtype=torch.float32)
    for at, key in enumerate("qkv"):
        layer = model["attn"][key]
        assert isinstance(layer, QuantLinear) and torch.equal(layer.weight + 0, numbers[32 * at : 32 * at + 32])
    # Rows of the file, not copies.
    x, down, up = torch.randn(2, 64), torch.randn(4, 64), torch.randn(32, 4)
    have = model["attn"]["k"](x) + (x @ down.t()) @ up.t()
    torch.testing.assert_close(have, x @ (numbers[32:64] + up @ down).t(), rtol=1e-4, atol=1e-4)


def test_rows_of_blocks_are_gathered_packed() -> None:
    packed, numbers = blocks("Q5_1", 40, 64)
    tensor = torch.from_numpy(packed)
    (weight,) = find({"w.weight": tensor}, None, {"w": "Q5_1"}).packed.values()
    known = described(weight.weight.to_json())
    rows = torch.tensor([39, 3, 3])
    some, taken = selected(known, [tensor], rows)
    assert taken[0].shape[0] == 3 and torch.equal(dequantize(some.weight, taken), numbers[rows])
