"""Makes the files of this folder but those of `make_words.py`: quantized layers with the numbers that they stand for, by independent code.

Each file holds the tensors of one or more layers as users have them, and for each weight `W` a tensor `expected.W` of F32. The
numbers come from PyTorch's own float8 types, from torchao, or from the format's formula in float64; metadata `ulps` says how
many steps of f32 ours may be off. Run in an environment with torch, torchao, numpy and safetensors:

    python make.py [folder]

Two runs differ in the order of metadata at most.
"""

import base64
import json
import math

import torch
from common import E4, E5, all_bytes, bytes_of, marker, normal, random, save


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


NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
FP4 = [0.0, 0.005208333, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25]
FP4 = FP4 + [-number for number in FP4]


def bnb():
    """code[index] x largest of the block; where those are quantized, code[index] x largest + offset, each step in f32."""
    tensors, expected = {}, {}
    for kind, table in (("nf4", NF4), ("fp4", FP4)):
        table = torch.tensor(table)
        for name, shape, block, nested in (
            ("plain", (6, 64), 64, False), ("odd", (5, 13), 64, False), ("nested", (40, 64), 64, True), ("cut", (3, 67), 32, True),
        ):
            count = math.prod(shape)
            data = bytes_of(-(-count // 2))
            indexes = torch.stack([data >> 4, data & 15], 1).flatten()[:count].long()
            blocks = -(-count // block)
            layer = f"{kind}.{name}.weight"
            state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
            if nested:
                absmax = bytes_of(blocks)
                codes, second = normal(256), normal(-(-blocks // 16))
                offset = float(normal(1))
                scale = codes[absmax.long()] * second.repeat_interleave(16)[:blocks] + torch.tensor(offset)
                tensors |= {f"{layer}.nested_absmax": second, f"{layer}.nested_quant_map": codes}
                state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": offset}
            else:
                absmax = scale = normal(blocks).abs()
                absmax[0] = 0.0
            # Packed bytes are stored as bytes, or under another type that has room for them.
            stored = data.view(torch.bfloat16) if name == "plain" else data
            tensors |= {layer: stored.reshape(-1, 1), f"{layer}.absmax": absmax, f"{layer}.quant_map": table,
                        f"{layer}.quant_state.bitsandbytes__{kind}": marker(**state)}
            expected[layer] = (table[indexes] * scale.repeat_interleave(block)[:count]).reshape(shape)
    data, scale = all_bytes(9, 31).view(torch.int8), normal(9).abs()
    tensors |= {"int8.weight": data, "int8.SCB": scale, "int8.weight_format": torch.zeros((), dtype=torch.uint8)}
    # The reciprocal of 127 as bitsandbytes has it, in f32.
    expected["int8.weight"] = data.float() * scale[:, None] * torch.tensor(0.007874015718698502)
    save("bnb", tensors, expected)


def quanto():
    """scale x (number - shift), or scale x number - shift, in the scale's type; qint4 and qint2 as quanto packs them."""
    tensors, expected, modules = {}, {}, {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tag = str(dtype).removeprefix("torch.")
        scale = (normal(8, 1) / 50).to(dtype)
        for name, data in (("qint8", all_bytes(8, 40).view(torch.int8)), ("qfloat8_e4m3fn", all_bytes(8, 40).view(E4)),
                           ("qfloat8_e5m2", all_bytes(8, 40).view(E5))):
            layer = f"{tag}.{name}"
            tensors |= {f"{layer}.weight._data": data, f"{layer}.weight._scale": scale,
                        f"{layer}.input_scale": torch.ones(()), f"{layer}.output_scale": torch.ones(())}
            modules[layer] = {"weights": name, "activations": "none"}
            expected[f"{layer}.weight"] = data.float() * scale.float()
        for bits in (4, 2):
            for rows, columns, group in ((6, 64, 32), (5, 32, 32), (7, 24, 8)):
                groups = rows * columns // group
                codes = torch.randint(0, 2**bits, (groups, group), dtype=torch.uint8, generator=random)
                per_byte = 8 // bits
                packed_rows = -(-groups // per_byte)
                padded = torch.zeros(packed_rows * per_byte, group, dtype=torch.uint8)
                padded[:groups] = codes
                packed = torch.zeros(packed_rows, group, dtype=torch.uint8)
                for place in range(per_byte):
                    packed |= padded[place * packed_rows : (place + 1) * packed_rows] << (bits * place)
                scale = (normal(groups, 1) / 7).to(dtype)
                whole = torch.randint(0, 2**bits, (groups, 1), dtype=torch.int8, generator=random)
                part = normal(groups, 1).to(dtype)
                for kind, shift in (("whole", whole), ("part", part)):
                    layer = f"{tag}.qint{bits}.{kind}.{rows}"
                    tensors |= {f"{layer}.weight._data._data": packed, f"{layer}.weight._scale": scale,
                                f"{layer}.weight._shift": shift, f"{layer}.bias": torch.zeros(rows)}
                    modules[layer] = {"weights": f"qint{bits}", "activations": "none"}
                    if kind == "whole":
                        numbers = scale * (codes.to(torch.int8) - shift)
                    else:
                        numbers = scale * codes - shift
                    expected[f"{layer}.weight"] = numbers.float().reshape(rows, columns)
    text = base64.b64encode(json.dumps(modules).encode()).decode()
    save("quanto", tensors, expected, quantization_format="quanto", quantization_map_base64=text)


def torchao():
    """torchao's own tensors, written by its own functions and dequantized by its own method."""
    import torchao.quantization as ao
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    torch.manual_seed(7)
    configs = {
        "int8_row": ao.Int8WeightOnlyConfig(version=2),
        "int8_tensor": ao.Int8WeightOnlyConfig(version=2, granularity=ao.PerTensor()),
        "int8_group": ao.Int8WeightOnlyConfig(version=2, granularity=ao.PerGroup(32)),
        "int8_dynamic": ao.Int8DynamicActivationInt8WeightConfig(version=2),
        "fp8_row": ao.Float8WeightOnlyConfig(),
        "int4_group": ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(16)),
        "int3_asymmetric": ao.IntxWeightOnlyConfig(torch.int3, ao.PerGroup(32), mapping_type=ao.MappingType.ASYMMETRIC),
        "int8_axis": ao.IntxWeightOnlyConfig(torch.int8, ao.PerAxis(0)),
    }
    model = torch.nn.ModuleDict({name: torch.nn.Linear(96, 7) for name in configs}).requires_grad_(False)
    expected = {}
    for name, config in configs.items():
        ao.quantize_(model[name], config)
        expected[f"{name}.weight"] = model[name].weight.dequantize()
    tensors, metadata = flatten_tensor_state_dict(model.state_dict())
    save("torchao", tensors, expected, **metadata)


def w4a8():
    """clamp(round(level x group scale)) x row scale + correction, in f32; rounding is to even."""
    tensors, expected, layers = {}, {}, {}
    for name, codebook, correction, dtype in (
        ("plain", False, False, torch.float32), ("codes", True, False, E4), ("asymmetric", False, True, torch.float32),
        ("all", True, True, torch.bfloat16),
    ):
        rows, columns, group = 5, 64, 16
        data = bytes_of(rows, columns // 2)
        relative = (normal(rows, columns // group).abs() * 12).to(dtype)
        channel = normal(rows).abs() / 100
        indexes = torch.stack([data & 15, data >> 4], -1).flatten(1).long()
        table = normal(16).sort().values if codebook else torch.arange(16.0) - 8
        wide = relative.float().repeat_interleave(group, 1)
        numbers = (table[indexes] * wide).round().clamp(-127, 127) * channel[:, None]
        tensors |= {f"{name}.weight": data.view(torch.int8), f"{name}.weight_s_rel": relative, f"{name}.weight_s_channel": channel}
        if codebook:
            tensors[f"{name}.weight_codebook"] = table
        if correction:
            added = normal(columns // group, rows)
            tensors[f"{name}.weight_correction"] = added
            numbers = numbers + added.t().repeat_interleave(group, 1)
        layers[name] = {"format": "asym_w4a8_int8", "group_size": group, "convrot_groupsize": 64}
        expected[f"{name}.weight"] = numbers
    save("w4a8", tensors, expected, _quantization_metadata=json.dumps({"format_version": "1.0", "layers": layers}))


def pack_nibbles(codes):
    """4-bit numbers in the order of Nunchaku's kernels, by reshaping and permuting whole tensors."""
    rows, columns = codes.shape
    codes = codes.reshape(rows // 128, 8, 2, 8, columns // 64, 2, 4, 8).permute(0, 4, 1, 3, 6, 2, 5, 7)
    pairs = codes.reshape(-1, 2)
    return (pairs[:, 0] | pairs[:, 1] << 4).to(torch.uint8).view(torch.int8).reshape(rows, columns // 2)


def pack_scales(scales):
    """Scales [rows, groups] of 16 bits."""
    rows, groups = scales.shape
    scales = scales.reshape(rows // 128, 8, 2, 4, 2, groups).permute(0, 5, 1, 3, 2, 4)
    return scales.reshape(groups, rows)


def pack_small_scales(scales):
    """FP8 scales [rows, groups], four groups at a time."""
    rows, groups = scales.shape
    scales = scales.view(torch.uint8).reshape(rows // 128, 4, 4, 8, groups // 4, 4).permute(0, 4, 3, 2, 1, 5)
    return scales.reshape(groups, rows).view(E4)


def pack_low_rank(matrix, down):
    """Up [rows, rank] or down [rank, columns], in tiles of 16 x 16."""
    across, along = matrix.shape
    tiles = matrix.reshape(across // 16, 16, along // 16, 16)
    # The weight's own dimension comes first, the rank second.
    tiles = tiles.permute(2, 0, 1, 3) if down else tiles.permute(0, 2, 1, 3)
    first, second = tiles.shape[:2]
    tiles = tiles.reshape(first, second, 2, 8, 2, 4, 2).permute(0, 1, 3, 5, 2, 4, 6)
    return tiles.reshape(*(matrix.t().shape if down else matrix.shape))


def nunchaku():
    """Known numbers, packed; the formula is computed on the unpacked ones in float64."""
    tensors, expected = {}, {}
    for kind, name, rows, columns, rank, dtype in (
        ("int4", "small", 128, 128, 16, torch.bfloat16), ("int4", "wide", 128, 256, 32, torch.float16),
        ("fp4", "bare", 128, 128, 16, torch.bfloat16), ("fp4", "whole", 256, 128, 32, torch.float16),
    ):
        layer = f"{kind}.{name}"
        codes = torch.randint(0, 16, (rows, columns), generator=random)
        up, down = normal(rows, rank).to(dtype), normal(rank, columns).to(dtype)
        smooth = (normal(columns).abs() + 0.1).to(dtype)
        factor = torch.ones(rows, 1, dtype=torch.float64)
        if kind == "int4":
            scales = (normal(rows, columns // 64) / 9).to(dtype)
            numbers, wide, packed = codes - 16 * (codes >= 8), scales.double().repeat_interleave(64, 1), pack_scales(scales)
        else:
            scales = (normal(rows, columns // 16) * 30).to(E4)
            steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            numbers = torch.cat([steps, -steps])[codes]
            wide, packed = scales.double().repeat_interleave(16, 1), pack_small_scales(scales)
            if name == "whole":
                channel, whole = (normal(rows) + 2).to(dtype), torch.tensor(0.0625)
                tensors |= {f"{layer}.wcscales": pack_scales(channel[:, None]).flatten(), f"{layer}.wtscale": whole}
                factor = channel.double()[:, None] * whole.double()
        tensors |= {
            f"{layer}.qweight": pack_nibbles(codes), f"{layer}.wscales": packed, f"{layer}.bias": torch.zeros(rows, dtype=dtype),
            f"{layer}.smooth_factor": pack_scales(smooth[:, None]).flatten(), f"{layer}.smooth_factor_orig": smooth,
            f"{layer}.proj_up": pack_low_rank(up, False), f"{layer}.proj_down": pack_low_rank(down, True),
        }
        expected[f"{layer}.weight"] = numbers.double() * wide * factor / smooth.double() + up.double() @ down.double()
    rows, columns = 12, 192
    codes = torch.randint(0, 16, (rows, columns), generator=random)
    scales, shifts = (normal(rows, columns // 64).bfloat16() for _ in range(2))
    words = codes.reshape(rows // 4, 4, columns // 64, 2, 4, 8).permute(0, 2, 1, 3, 5, 4)
    words = (words << torch.tensor([0, 4, 8, 12])).sum(-1).reshape(-1)
    words = (words - 65536 * (words >= 32768)).to(torch.int16).view(torch.int32).reshape(rows // 4, columns // 2)
    tensors |= {"awq.qweight": words, "awq.wscales": scales.t(), "awq.wzeros": shifts.t()}
    wide = [values.float().repeat_interleave(64, 1) for values in (scales, shifts)]
    expected["awq.weight"] = codes.float() * wide[0] + wide[1]
    save("nunchaku", tensors, expected, ulps=1)


if __name__ == "__main__":
    for make in (fp8, int8, rotation, blocked, bnb, quanto, torchao, w4a8, nunchaku):
        make()
