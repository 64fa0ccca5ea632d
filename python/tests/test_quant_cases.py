"""Files as users had them, on which other loaders gave noise, crashed, or took packed bytes for numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from offload_files import write
from quant_files import corpus, fp8_parts, int8_parts, only
from torch import Tensor, nn

from weightstream import QuantizationError, offload
from weightstream.quant import QuantLinear

PREFIX = "model.diffusion_model."


def layers(**shapes: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict(
        {name: nn.Linear(columns, rows, bias=False, device="meta") for name, (rows, columns) in shapes.items()}
    )


def scaled(value: float = 0.0013) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"weight": (torch.randn(32, 32) * 0.035 / value).to(torch.float8_e4m3fn), "scale": torch.tensor(value)}


@pytest.mark.parametrize("spelling", ["weight_scale", "scale_weight", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_scaled_fp8_is_scaled_in_every_spelling(tmp_path: Path, spelling: str, shape: tuple[int, ...]) -> None:
    one = scaled()
    sd = {
        f"{PREFIX}scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn),
        f"{PREFIX}to_k.weight": one["weight"],
        f"{PREFIX}to_k.{spelling}": one["scale"].view(shape),
        f"{PREFIX}to_k.input_scale": torch.tensor(0.0157),
    }
    model = layers(to_k=(32, 32))
    offload.load_model_data(model, write(tmp_path / "x.safetensors", sd), default_dtype=torch.float32)
    numbers = model["to_k"].weight + 0
    assert float(numbers.std()) == pytest.approx(0.035, rel=0.1)
    assert torch.equal(numbers, one["weight"].float() * one["scale"])


def test_two_spellings_must_agree_and_none_may_be_missing(tmp_path: Path) -> None:
    one = scaled()
    sd = {"to_k.weight": one["weight"], "to_k.weight_scale": one["scale"], "to_k.scale_weight": one["scale"].clone()}
    model = layers(to_k=(32, 32))
    offload.load_model_data(model, sd, default_dtype=torch.float32)
    assert torch.equal(model["to_k"].weight + 0, one["weight"].float() * one["scale"])
    sd["to_k.scale_weight"] = one["scale"] * 2
    with pytest.raises(QuantizationError, match=r"to_k\.weight.* has two scales that differ"):
        offload.load_model_data(layers(to_k=(32, 32)), sd)
    sd = {"to_k.weight": one["weight"], "to_k.weight_scale": one["scale"], "to_v.weight": one["weight"].clone()}
    with pytest.raises(QuantizationError, match=r"to_v\.weight.* has no scale"):
        offload.load_model_data(layers(to_k=(32, 32), to_v=(32, 32)), sd)


def nvfp4(rows: int = 128, columns: int = 64) -> tuple[dict[str, Tensor], Tensor]:
    """NVFP4 as official files have it, and its numbers by the written formula."""
    torch.manual_seed(1)
    codes = torch.randint(0, 16, (rows, columns))
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    scales = torch.rand(rows, columns // 16).add(0.5).to(torch.float8_e4m3fn)
    second = torch.tensor(0.01)
    tiled = scales.view(torch.uint8).view(rows // 128, 4, 32, columns // 64, 4).permute(0, 3, 2, 1, 4).contiguous()
    parts = {
        "weight": (codes[:, 0::2] << 4 | codes[:, 1::2]).to(torch.uint8),
        "weight_scale": tiled.view(torch.float8_e4m3fn).view(rows, columns // 16),
        "weight_scale_2": second,
        "input_scale": torch.tensor(0.5),
    }
    return parts, table[codes] * (scales.float() * second).repeat_interleave(16, 1)


def test_nvfp4_without_metadata_beside_plain_weights_and_an_index_table(tmp_path: Path) -> None:
    parts, numbers = nvfp4()
    table = torch.arange(64, dtype=torch.uint8).view(8, 8)
    sd = {f"to_q.{name}": part for name, part in parts.items()}
    sd.update({"plain.weight": torch.randn(8, 8).bfloat16(), "table": table})
    model = layers(to_q=(128, 64), plain=(8, 8))
    model.register_buffer("table", torch.zeros(8, 8, dtype=torch.uint8))
    offload.load_model_data(model, write(tmp_path / "x.safetensors", sd), default_dtype=torch.float32)
    assert isinstance(model["to_q"], QuantLinear) and "NVFP4" in model["to_q"].format
    torch.testing.assert_close(model["to_q"].weight + 0, numbers)
    assert type(model["plain"]) is nn.Linear and torch.equal(model.table, table)


def test_nvfp4_and_fp8_in_one_file_have_a_handler_each(tmp_path: Path) -> None:
    parts, numbers = nvfp4()
    sd = {f"a.{name}": part for name, part in parts.items()}
    sd.update(fp8_parts(64, 128, "b.weight"))
    sd.update(int8_parts(32, 64, "c.weight"))
    model = layers(a=(128, 64), b=(64, 128), c=(32, 64))
    offload.load_model_data(model, write(tmp_path / "x.safetensors", sd), default_dtype=torch.float32)
    assert [layer.format.split()[0] for layer in model.values()] == ["NVFP4", "FP8", "INT8"]
    torch.testing.assert_close(model["a"].weight + 0, numbers)


def text(value: object) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def test_markers_that_say_nothing_leave_it_to_the_tensors(tmp_path: Path) -> None:
    fp8 = fp8_parts(32, 32)
    empty = {"embed": torch.zeros(29, dtype=torch.uint8), "a": torch.zeros(0, dtype=torch.uint8)}
    sd = {
        "embed.weight": torch.randn(64, 32).bfloat16(),
        "a.weight": torch.randn(8, 8).bfloat16(),
        "b.weight": fp8["weight"],
        "b.weight_scale": fp8["weight_scale"],
        "b.comfy_quant": text({"full_precision_matrix_mult": True}),
        "c.weight": fp8["weight"].clone(),
        "c.weight_scale": fp8["weight_scale"].clone(),
        "c.comfy_quant": torch.zeros(29, dtype=torch.uint8),
    }
    sd.update({f"{name}.comfy_quant": marker for name, marker in empty.items()})
    model = layers(a=(8, 8), b=(32, 32), c=(32, 32))
    model["embed"] = nn.Embedding(64, 32, device="meta")
    offload.load_model_data(model, write(tmp_path / "x.safetensors", sd))
    assert type(model["embed"]) is nn.Embedding and type(model["a"]) is nn.Linear
    assert isinstance(model["b"], QuantLinear) and isinstance(model["c"], QuantLinear)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": "fp8", "comfy_quant": torch.zeros(29, dtype=torch.uint8)},  # wiped, and no scale
        {"weight": "fp8", "weight_scale": "one", "comfy_quant": torch.tensor([255, 254, 0, 1], dtype=torch.uint8)},
        {"weight": "fp8", "weight_scale": "one", "comfy_quant": text([1, 2])},
        {"weight": "bf16", "comfy_quant": text({"format": "nvfp4"})},
    ],
)
def test_markers_that_cannot_be_followed_name_the_layer(tmp_path: Path, wrong: dict[str, object]) -> None:
    values = {"fp8": fp8_parts(8, 8)["weight"], "one": torch.tensor(0.5), "bf16": torch.randn(8, 8).bfloat16()}
    sd = {f"fc.{name}": values.get(value, value) if isinstance(value, str) else value for name, value in wrong.items()}
    with pytest.raises(QuantizationError, match=r"fc\.(weight|comfy_quant)"):
        offload.load_model_data(layers(fc=(8, 8)), write(tmp_path / "x.safetensors", sd))


def convrot(marker: object) -> dict[str, Tensor]:
    packed = next(one for one in corpus("rotation")[0].packed.values() if one.weight.transforms[0][1] == 256)
    sd = {f"qkv.{name}": part for name, part in packed.parts.items()}
    if marker is not None:
        sd["qkv.comfy_quant"] = marker if isinstance(marker, Tensor) else text(marker)
    return sd


ROTATED = {"convrot": True, "convrot_groupsize": 256}


@pytest.mark.parametrize("marker", [{"format": "int8_tensorwise", **ROTATED}, ROTATED, {"convrot": True}])
def test_rotated_int8_is_rotated_with_or_without_its_format(tmp_path: Path, marker: object) -> None:
    model = layers(qkv=(6, 512))
    offload.load_model_data(model, write(tmp_path / "x.safetensors", convrot(marker)), default_dtype=torch.float32)
    assert model["qkv"].quant_weight.transforms == [("Hadamard", 256)]
    original = corpus("rotation")[1]["group256.weight"].view(6, 512)
    x = torch.randn(4, 512)
    have, want = model["qkv"](x), x @ original.t()
    assert float((have - want).norm() / want.norm()) < 0.02


def test_rotations_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for marker, why in (
        (text({"format": "int8_tensorwise", **ROTATED})[:30], "comfy_quant"),  # cut in half
        ({"convrot": True, "convrot_groupsize": 128}, "no power of four"),
        ({"convrot": True, "convrot_groupsize": 1024}, "no multiple"),
    ):
        with pytest.raises(QuantizationError, match=why):
            offload.load_model_data(layers(qkv=(6, 512)), write(tmp_path / "x.safetensors", convrot(marker)))


def test_rounded_scales_are_widened_and_said(tmp_path: Path) -> None:
    sd = int8_parts(16, 32, "fc.weight")
    sd["fc.weight_scale"] = sd["fc.weight_scale"].bfloat16()
    model = layers(fc=(16, 32))
    offload.load_model_data(model, write(tmp_path / "x.safetensors", sd), default_dtype=torch.float32)
    assert torch.equal(model["fc"].weight + 0, sd["fc.weight"].float() * sd["fc.weight_scale"].float())
    assert any("BF16, widened to F32" in note for note in model._weightstream_load["notes"])
    assert only(sd).weight.parts[1][2] == "BF16"
