"""Makes the files of this folder whose numbers lie in words or beside scales in rows, each from numbers of its own seed: NVFP4 of
compressed-tensors and ModelOpt, GPTQ, AWQ, and integers of compressed-tensors.

What the files hold is as in `make.py`. Run in an environment with torch, safetensors, and compressed-tensors 0.20.1 (and loguru and
pydantic, which it needs):

    python make_words.py [folder]
"""

import json

import torch
from common import E4, bytes_of, normal, random, save, seeded


def nvfp4_in_rows():
    """NVFP4 with scales in rows: as compressed-tensors packs and unpacks it, and by ModelOpt's formula."""
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8

    tensors, expected = {}, {}
    modelopt, expected_modelopt = {}, {}
    steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name, rows, columns in (("small", 3, 16), ("odd", 130, 80), ("tiles", 128, 64)):
        numbers = torch.cat([steps, -steps])[torch.randint(0, 16, (rows, columns), generator=random)]
        packed = pack_fp4_to_uint8(numbers)
        scale, whole = bytes_of(rows, columns // 16).view(E4), torch.tensor([317.25])
        tensors |= {f"{name}.weight_packed": packed, f"{name}.weight_scale": scale, f"{name}.weight_global_scale": whole,
                    f"{name}.input_global_scale": torch.tensor([12.0])}
        codes = unpack_fp4_from_uint8(packed, rows, columns, torch.float32)
        expected[f"{name}.weight"] = codes * (scale.float() / whole).repeat_interleave(16, 1)
        data = bytes_of(rows, columns // 2)
        low, high = (torch.cat([steps, -steps])[(data >> shift & 15).long()] for shift in (0, 4))
        second = torch.tensor(0.0037)
        modelopt |= {f"{name}.weight": data, f"{name}.weight_scale": scale, f"{name}.weight_scale_2": second,
                     f"{name}.input_scale": torch.tensor(0.5)}
        factor = (scale.float() * second).repeat_interleave(16, 1)
        expected_modelopt[f"{name}.weight"] = torch.stack([low, high], -1).flatten(1) * factor
    save("nvfp4-compressed-tensors", tensors, expected)
    config = json.dumps({"quant_method": "modelopt", "quant_algo": "NVFP4"})
    save("nvfp4-modelopt", modelopt, expected_modelopt, quantization_config=config)


def words(numbers, bits, order=None):
    """Numbers of so many bits in words of 32, along the last dimension; `order` gives the number at each place of a word."""
    per_word = 32 // bits
    numbers = numbers.reshape(*numbers.shape[:-1], -1, per_word)[..., order or list(range(per_word))].long()
    packed = (numbers << (torch.arange(per_word) * bits)).sum(-1)
    return (packed - (packed >= 2**31) * 2**32).to(torch.int32)


def packed_int():
    """GPTQ and AWQ: packed by loops over the layouts that AutoGPTQ and AutoAWQ document, and the formula in float64."""
    for file, less in (("gptq", 1), ("gptq-v2", 0)):
        tensors, expected = {}, {}
        for bits in (2, 4, 8):
            for name, rows, columns, groups, kind in (
                ("plain", 32, 64, 2, "none"), ("ordered", 16, 96, 3, "ordered"), ("shuffled", 48, 128, 4, "shuffled"),
                ("one", 16, 32, 1, "none"),
            ):
                layer = f"{name}{bits}"
                codes = torch.randint(0, 2**bits, (rows, columns), generator=random)
                zeros = torch.randint(less, 2**bits, (groups, rows), generator=random)
                scales = (normal(groups, rows) / 30).half()
                group = torch.arange(columns) // (columns // groups)
                if kind == "shuffled":
                    group = group[torch.randperm(columns, generator=random)]
                tensors |= {f"{layer}.qweight": words(codes, bits).t(), f"{layer}.qzeros": words(zeros - less, bits),
                            f"{layer}.scales": scales, f"{layer}.bias": torch.zeros(rows).half()}
                if kind != "none":
                    tensors[f"{layer}.g_idx"] = group.to(torch.int32)
                wide = scales.double()[group].t() * (codes - zeros[group].t())
                expected[f"{layer}.weight"] = wide
        config = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"} if file == "gptq-v2" else {"quant_method": "gptq"}
        save(file, tensors, expected, quantization_config=json.dumps(config))
    tensors, expected = {}, {}
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    for name, rows, columns, groups in (("small", 8, 4, 1), ("plain", 64, 96, 3), ("one", 24, 128, 1)):
        codes = torch.randint(0, 16, (rows, columns), generator=random)
        zeros = torch.randint(0, 16, (groups, rows), generator=random)
        scales = (normal(groups, rows) / 30).half()
        tensors |= {f"{name}.qweight": words(codes.t(), 4, order), f"{name}.qzeros": words(zeros, 4, order), f"{name}.scales": scales}
        group = torch.arange(columns) // (columns // groups)
        expected[f"{name}.weight"] = scales.double()[group].t() * (codes - zeros[group].t())
    save("awq", tensors, expected)


def three_bits():
    """GPTQ in 3 bits, packed as AutoGPTQ does it: ten numbers, one that two words share, ten, another, and ten."""

    def pack(numbers):
        """Along the first dimension, 32 numbers in three words."""
        numbers = numbers.long()
        packed = torch.zeros(numbers.shape[0] // 32 * 3, *numbers.shape[1:], dtype=torch.long)
        at = row = 0
        while row < packed.shape[0]:
            for place in range(10):
                packed[row] |= numbers[at + place] << (3 * place)
            at += 10
            packed[row] |= (numbers[at] & 3) << 30
            row += 1
            packed[row] |= numbers[at] >> 2
            at += 1
            for place in range(10):
                packed[row] |= numbers[at + place] << (3 * place + 1)
            at += 10
            packed[row] |= (numbers[at] & 1) << 31
            row += 1
            packed[row] |= numbers[at] >> 1
            at += 1
            for place in range(10):
                packed[row] |= numbers[at + place] << (3 * place + 2)
            at += 10
            row += 1
        return (packed - (packed >= 2**31) * 2**32).to(torch.int32)

    tensors, expected = {}, {}
    for name, rows, columns, groups, kind in (("plain", 32, 64, 2, "none"), ("shuffled", 96, 128, 4, "shuffled"), ("one", 64, 32, 1, "none")):
        codes = torch.randint(0, 8, (rows, columns), generator=random)
        zeros = torch.randint(1, 8, (groups, rows), generator=random)
        scales = (normal(groups, rows) / 30).half()
        group = torch.arange(columns) // (columns // groups)
        tensors |= {f"{name}.qweight": pack(codes.t()), f"{name}.qzeros": pack((zeros - 1).t()).t(), f"{name}.scales": scales}
        if kind == "shuffled":
            group = group[torch.randperm(columns, generator=random)]
            tensors[f"{name}.g_idx"] = group.to(torch.int32)
        expected[f"{name}.weight"] = scales.double()[group].t() * (codes - zeros[group].t())
    save("gptq-3bit", tensors, expected, quantization_config=json.dumps({"quant_method": "gptq"}))


def pack_quantized():
    """Integers of compressed-tensors, packed and dequantized by its own compressor; by the formula where columns have an order of
    their own, which older versions wrote."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    tensors, expected = {}, {}
    for bits in (2, 3, 4, 8):
        for name, rows, columns, groups, symmetric in (
            ("group", 6, 96, 3, True), ("channel", 5, 67, 1, True), ("zeros", 17, 128, 4, False), ("channel_zeros", 33, 40, 1, False),
            ("ordered", 8, 64, 2, True),
        ):
            layer = f"{name}{bits}"
            least, most = -(2 ** (bits - 1)), 2 ** (bits - 1)
            codes = torch.randint(least, most, (rows, columns), generator=random)
            zeros = torch.randint(least, most, (rows, groups), generator=random)
            scale = normal(rows, groups).abs() / 30
            group = torch.arange(columns) // (columns // groups)
            if name == "ordered":
                group = group[torch.randperm(columns, generator=random)]
            weight = (codes - (0 if symmetric else zeros[:, group])) * scale[:, group]
            if name == "ordered":
                packed = {"weight_packed": pack_to_int32(codes.to(torch.int8), bits), "weight_scale": scale,
                          "weight_shape": torch.tensor(weight.shape), "weight_g_idx": group.to(torch.int32)}
                expected[f"{layer}.weight"] = weight
            else:
                kind = dict(strategy="group", group_size=columns // groups) if groups > 1 else dict(strategy="channel")
                args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, **kind)
                scheme = QuantizationScheme(targets=["Linear"], weights=args)
                state = {"weight": weight, "weight_scale": scale}
                if not symmetric:
                    state["weight_zero_point"] = zeros.to(torch.int8)
                packed = PackedQuantizationCompressor.compress(state, scheme)
                expected[f"{layer}.weight"] = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
            tensors |= {f"{layer}.{key}": value for key, value in packed.items()}
    save("compressed-tensors-int", tensors, expected)


def experts():
    """FP8 and INT8 weights of three dimensions: a scale a matrix, a row or a block of each, by the formula."""
    tensors, expected = {}, {}
    for kind, dtype in (("e4m3", E4), ("int8", torch.int8)):
        for name, shape, scales in (
            ("matrix", (3, 5, 8), (3, 1, 1)), ("row", (3, 5, 8), (3, 5, 1)), ("block", (2, 128, 130), (2, 1, 2)),
            ("group", (4, 6, 64), (4, 6, 2)), ("square", (3, 8, 12), (3, 2, 3)),
        ):
            data = bytes_of(*shape).view(dtype)
            scale = normal(*scales)
            high, wide = (-(-shape[axis] // scales[axis]) for axis in (1, 2))
            if name == "block":
                high = wide = 128
            layer = f"{kind}.{name}"
            tensors |= {f"{layer}.weight": data, f"{layer}.weight_scale": scale}
            factor = scale.repeat_interleave(high, 1).repeat_interleave(wide, 2)[:, : shape[1], : shape[2]]
            expected[f"{layer}.weight"] = data.float() * factor
    save("experts", tensors, expected)


if __name__ == "__main__":
    for make in (seeded(nvfp4_in_rows, 1), seeded(packed_int, 2), seeded(three_bits, 3), seeded(pack_quantized, 4), seeded(experts, 5)):
        make()
