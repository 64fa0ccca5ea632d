"""Makes the files of this folder: quantized layers of every format with the numbers that they stand for, by independent code.

Each file holds the tensors of one or more layers as users have them, and for each weight `W` a tensor `expected.W` of F32. The
numbers come from PyTorch's own float8 types, from torchao, or from the format's formula in float64; metadata `ulps` says how
many steps of f32 ours may be off. Run in an environment with torch, torchao, numpy and safetensors:

    python make.py [folder]
"""

import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
random = torch.Generator().manual_seed(20240613)


def bytes_of(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)


def normal(*shape):
    return torch.randn(shape, generator=random)


def all_bytes(rows, columns):
    """Random bytes, among them every one there is, where there is room."""
    data = bytes_of(rows, columns).flatten()
    data[:256] = torch.arange(256, dtype=torch.uint8)[: data.numel()]
    return data.reshape(rows, columns)


def marker(**fields):
    return torch.frombuffer(bytearray(json.dumps(fields).encode()), dtype=torch.uint8).clone()


def save(name, tensors, expected, ulps=0, **metadata):
    tensors = {key: value.contiguous().clone() for key, value in tensors.items()}
    for key, value in expected.items():
        tensors[f"expected.{key}"] = value.to(torch.float32).contiguous().clone()
    save_file(tensors, FOLDER / f"{name}.safetensors", {"ulps": str(ulps), **metadata})


def fp8():
    tensors, expected = {}, {}
    scales = {
        "one": torch.tensor(0.0013), "list": torch.tensor([0.7]), "huge": torch.tensor(3e38), "zero": torch.tensor(0.0),
        "nan": torch.tensor(float("nan")), "half": torch.tensor(0.25, dtype=torch.bfloat16),
    }
    for kind, dtype in (("e4m3", E4), ("e5m2", E5)):
        for spelling in ("scale_weight", "weight_scale", "weight_scale_inv"):
            for name, scale in scales.items():
                layer = f"{kind}.{spelling}.{name}"
                data = all_bytes(19, 17).view(dtype)
                tensors |= {f"{layer}.weight": data, f"{layer}.{spelling}": scale}
                expected[f"{layer}.weight"] = data.float() * scale.float()
        row = normal(19)
        for name, shape in (("row", (19,)), ("column", (19, 1))):
            data = all_bytes(19, 17).view(dtype)
            tensors |= {f"{kind}.{name}.weight": data, f"{kind}.{name}.weight_scale": row.reshape(shape)}
            expected[f"{kind}.{name}.weight"] = data.float() * row[:, None]
        # A convolution: one scale a filter, and one for all.
        data = all_bytes(6, 45).reshape(6, 5, 3, 3).view(dtype)
        filters = normal(6, 1, 1, 1)
        tensors |= {f"{kind}.conv.weight": data, f"{kind}.conv.weight_scale": filters}
        expected[f"{kind}.conv.weight"] = data.float() * filters
        # Blocks of 128 × 128, the last ones cut; and blocks that divide the matrix.
        data = bytes_of(130, 200).view(dtype)
        blocks = normal(2, 2)
        wide = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[:130, :200]
        tensors |= {f"{kind}.block.weight": data, f"{kind}.block.weight_scale_inv": blocks}
        expected[f"{kind}.block.weight"] = data.float() * wide
        data = all_bytes(12, 64).view(dtype)
        groups = normal(12, 2)
        tensors |= {f"{kind}.group.weight": data, f"{kind}.group.weight_scale": groups}
        expected[f"{kind}.group.weight"] = data.float() * groups.repeat_interleave(32, 1)
    save("fp8", tensors, expected)
    plain = {"a.weight": all_bytes(16, 16).view(E4), "b.weight": all_bytes(16, 16).view(E5), "c.bias": bytes_of(7).view(E4)}
    save("fp8-plain", plain, {key: value.float() for key, value in plain.items()})


def int8():
    tensors, expected = {}, {}
    for name, scale in (("tensor", torch.tensor(0.02)), ("row", normal(7)), ("column", normal(7, 1).bfloat16())):
        data = all_bytes(7, 256).view(torch.int8)
        tensors |= {f"{name}.weight": data, f"{name}.weight_scale": scale}
        wide = scale if scale.ndim == 0 else scale.float().reshape(7, 1)
        expected[f"{name}.weight"] = data.float() * wide
    rotated = dict(format="int8_tensorwise", convrot=True, convrot_groupsize=256)
    data, scale = all_bytes(5, 512).view(torch.int8), normal(5, 1)
    tensors |= {"rotated.weight": data, "rotated.weight_scale": scale, "rotated.comfy_quant": marker(**rotated)}
    expected["rotated.weight"] = data.float() * scale
    save("int8", tensors, expected)


def rotation():
    """Weights rotated and quantized as converters do, with the weight before: what a rotated input must meet."""
    h4 = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64)
    tensors, expected = {}, {}
    for group in (4, 16, 64, 256):
        h = torch.ones(1, 1, dtype=torch.float64)
        while h.shape[0] < group:
            h = torch.kron(h, h4)
        weight = normal(6, 512).double()
        turned = (weight.reshape(6, -1, group) @ (h / math.sqrt(group))).reshape(6, 512)
        scale = (turned.abs().amax(1, keepdim=True) / 127).float()
        data = (turned / scale).round().clamp(-128, 127).to(torch.int8)
        name = f"group{group}"
        note = marker(format="int8_tensorwise", convrot=True, convrot_groupsize=group)
        tensors |= {f"{name}.weight": data, f"{name}.weight_scale": scale, f"{name}.comfy_quant": note}
        expected[f"{name}.weight"] = weight
    save("rotation", tensors, expected)


def blocked():
    """The formats with scales in tiles; torchao lays them out."""
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32
    from torchao.prototype.mx_formats.utils import to_blocked

    def tiles(scale):
        rows, columns = -(-scale.shape[0] // 128) * 128, -(-scale.shape[1] // 4) * 4
        return to_blocked(scale.view(torch.uint8)).reshape(rows, columns).view(scale.dtype)

    def fp4(packed, high_first):
        high, low = packed >> 4, packed & 15
        return f4_unpacked_to_f32(torch.stack([high, low] if high_first else [low, high], -1).flatten(1))

    tensors, expected = {}, {}
    for name, rows, columns in (("small", 3, 16), ("odd", 130, 80), ("whole", 128, 64)):
        data, scale = bytes_of(rows, columns // 2), bytes_of(rows, columns // 16).view(E4)
        second = torch.tensor(0.37)
        layer = f"high.{name}"
        tensors |= {f"{layer}.weight": data, f"{layer}.weight_scale": tiles(scale), f"{layer}.weight_scale_2": second,
                    f"{layer}.input_scale": torch.tensor(1.5)}
        factor = (second * scale.float()).repeat_interleave(16, 1)
        expected[f"{layer}.weight"] = fp4(data, True) * factor
        layer = f"low.{name}"
        alpha, given = torch.tensor(0.0021), torch.tensor(173.5)
        tensors |= {f"{layer}.weight": data, f"{layer}.weight_scale": tiles(scale), f"{layer}.alpha": alpha,
                    f"{layer}.input_global_scale": given}
        expected[f"{layer}.weight"] = fp4(data, False) * scale.float().repeat_interleave(16, 1) * (alpha * given)
        layer = f"absmax.{name}"
        largest, whole = torch.tensor(11.25), torch.tensor(341.0)
        tensors |= {f"{layer}.weight": data, f"{layer}.weight_scale": tiles(scale), f"{layer}.input_absmax": largest,
                    f"{layer}.weight_global_scale": whole}
        given = 2688.0 / largest
        factor = (1.0 / (given * whole)) * given
        expected[f"{layer}.weight"] = fp4(data, False) * scale.float().repeat_interleave(16, 1) * factor
    smooth = normal(80)
    tensors["high.odd.pre_quant_scale"] = smooth
    save("nvfp4", tensors, expected)

    tensors, expected = {}, {}
    for kind, dtype in (("e4m3", E4), ("e5m2", E5)):
        for name, rows, columns in (("small", 3, 32), ("odd", 131, 96), ("whole", 128, 128)):
            data, scale = bytes_of(rows, columns).view(dtype), bytes_of(rows, columns // 32)
            layer = f"{kind}.{name}"
            tensors |= {f"{layer}.weight": data, f"{layer}.weight_scale": tiles(scale), f"{layer}.comfy_quant": marker(format="mxfp8")}
            wide = scale.view(torch.float8_e8m0fnu).float().repeat_interleave(32, 1)
            expected[f"{layer}.weight"] = data.float() * wide
        data, scale = bytes_of(5, 96).view(dtype), bytes_of(5, 3).view(torch.float8_e8m0fnu)
        tensors |= {f"{kind}.rows.weight": data, f"{kind}.rows.weight_scale": scale}
        expected[f"{kind}.rows.weight"] = data.float() * scale.float().repeat_interleave(32, 1)
    save("mxfp8", tensors, expected)


if __name__ == "__main__":
    for make in (fp8, int8, rotation, blocked):
        make()
