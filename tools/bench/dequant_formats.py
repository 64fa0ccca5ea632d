"""The weights of the bench `dequant`: one of every format, described as a file would hold it, with bytes that are numbers.

A format is a list of tensors: what follows the layer's name, type, and shape as functions of rows and columns, or what is in it.
"""

import json
import math
import struct

import place
import torch

GGML = {
    # Bytes and elements of a block.
    **{"Q4_0": (18, 32), "Q4_1": (20, 32), "Q5_0": (22, 32), "Q5_1": (24, 32), "Q8_0": (34, 32), "Q8_1": (36, 32)},
    **{"Q1_0": (18, 128), "Q2_0": (18, 64), "Q2_K": (84, 256), "Q3_K": (110, 256), "Q4_K": (144, 256)},
    **{"Q5_K": (176, 256), "Q6_K": (210, 256), "Q8_K": (292, 256), "IQ4_NL": (18, 32), "IQ4_XS": (136, 256)},
    **{"MXFP4": (17, 32), "NVFP4": (36, 64), "TQ1_0": (54, 256), "TQ2_0": (66, 256), "IQ1_S": (50, 256)},
    **{"IQ1_M": (56, 256), "IQ2_XXS": (66, 256), "IQ2_XS": (74, 256), "IQ2_S": (82, 256), "IQ3_XXS": (98, 256)},
    "IQ3_S": (110, 256),
}
SIZES = {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BF16": 2, "F16": 2, "I32": 4, "F32": 4, "I64": 8}


def tensors(rows, columns):
    """The tensors of each format that is no block of ggml, and what is read of them to describe it."""
    r, c, all_ = rows, columns, rows * columns
    nf4 = {"quant_type": "nf4", "blocksize": 64, "shape": [r, c], "dtype": "bfloat16"}
    nested = nf4 | {"nested_blocksize": 256, "nested_offset": 0.5, "nested_dtype": "float32"}
    state = "weight.quant_state.bitsandbytes__nf4"
    convrot = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
    return {
        "FP8, no scale": [("weight", "F8_E4M3", [r, c])],
        "FP8, one scale": [("weight", "F8_E4M3", [r, c]), ("weight_scale", "F32", [])],
        "FP8 E5M2, a scale a row": [("weight", "F8_E5M2", [r, c]), ("weight_scale", "F32", [r, 1])],
        "FP8, 128 x 128": [("weight", "F8_E4M3", [r, c]), ("weight_scale_inv", "F32", [r // 128, c // 128])],
        "INT8, a scale a row": [("weight", "I8", [r, c]), ("weight_scale", "F32", [r, 1])],
        "INT8, rotated": [
            ("weight", "I8", [r, c]),
            ("weight_scale", "F32", [r, 1]),
            ("comfy_quant", "U8", convrot),
        ],
        "MXFP8": [
            ("weight", "F8_E4M3", [r, c]),
            ("weight_scale", "U8", [r, c // 32]),
            ("comfy_quant", "U8", {"format": "mxfp8"}),
        ],
        "NVFP4 (beside)": [
            ("weight", "U8", [r, c // 2]),
            ("weight_scale", "F8_E4M3", [r, c // 16]),
            ("weight_scale_2", "F32", []),
        ],
        "bitsandbytes INT8": [("weight", "I8", [r, c]), ("SCB", "F32", [r])],
        "bitsandbytes NF4": [
            ("weight", "U8", [all_ // 2, 1]),
            ("weight.absmax", "F32", [all_ // 64]),
            ("weight.quant_map", "F32", [16]),
            (state, "U8", nf4),
        ],
        "bitsandbytes NF4, nested": [
            ("weight", "U8", [all_ // 2, 1]),
            ("weight.absmax", "U8", [all_ // 64]),
            ("weight.quant_map", "F32", [16]),
            ("weight.nested_absmax", "F32", [all_ // 64 // 256]),
            ("weight.nested_quant_map", "F32", [256]),
            (state, "U8", nested),
        ],
        "quanto qint4": [
            ("weight._data._data", "U8", [all_ // 256, 128]),
            ("weight._scale", "BF16", [all_ // 128, 1]),
            ("weight._shift", "BF16", [all_ // 128, 1]),
        ],
        "SVDQuant INT4, rank 32": [
            ("qweight", "I8", [r, c // 2]),
            ("wscales", "BF16", [c // 64, r]),
            ("smooth_factor", "BF16", [c]),
            ("proj_down", "BF16", [c, 32]),
            ("proj_up", "BF16", [r, 32]),
        ],
        "Nunchaku AWQ": [
            ("qweight", "I32", [r // 4, c // 2]),
            ("wscales", "BF16", [c // 64, r]),
            ("wzeros", "BF16", [c // 64, r]),
        ],
        **{f"GPTQ, {bits} bits by 128": gptq(r, c, bits) for bits in (2, 3, 4, 8)},
        "GPTQ, 4 bits by 32": gptq(r, c, 4, 32),
        SHUFFLED: gptq(r, c, 4),
        "AWQ": [
            ("qweight", "I32", [c, r // 8]),
            ("qzeros", "I32", [c // 128, r // 8]),
            ("scales", "F16", [c // 128, r]),
        ],
        "compressed-tensors, 4 bits by 128": compressed(r, c, 4, 128),
        "compressed-tensors, 4 bits by 32, zero points": [
            *compressed(r, c, 4, 32),
            ("weight_zero_point", "I32", [r // 8, c // 32]),
        ],
        "compressed-tensors, 8 bits a row": compressed(r, c, 8, c),
    }


SHUFFLED = "GPTQ, 4 bits by 128, columns in their own order"


def gptq(rows, columns, bits, group=128):
    """As files of GPTQ have it, with the group of each column."""
    return [
        ("qweight", "I32", [columns * bits // 32, rows]),
        ("qzeros", "I32", [columns // group, rows * bits // 32]),
        ("scales", "F16", [columns // group, rows]),
        ("g_idx", "I32", [columns]),
    ]


def compressed(rows, columns, bits, group):
    """Integers as compressed-tensors packs them."""
    return [
        ("weight_packed", "I32", [rows, columns * bits // 32]),
        ("weight_scale", "BF16", [rows, columns // group]),
        ("weight_shape", "I64", struct.pack("<qq", rows, columns)),
    ]


def described(rows, columns):
    """(name, description, bytes of each part by its tensor's name) of every format."""
    from weightstream import _native

    found = []
    for kind, (block, elements) in GGML.items():
        ((weight, _),), _, _ = _native.quant_detect([("layer.weight", kind, [rows, columns])], {}, lambda _: b"", [])
        found.append((kind, weight, {"layer.weight": rows * columns // elements * block}))
    for name, parts in tensors(rows, columns).items():
        texts = {f"layer.{end}": held(shape) for end, _, shape in parts if not isinstance(shape, list)}
        listed = []
        for end, kind, shape in parts:
            text = texts.get(f"layer.{end}")
            listed.append((f"layer.{end}", kind, shape if text is None else [len(text) // SIZES[kind]]))
        weights, _, _ = _native.quant_detect(listed, {}, texts.__getitem__, [])
        weight = weights[0][0]
        wanted = {tensor for _, tensor, *_ in weight.parts}
        sizes = {tensor: SIZES[kind] * math.prod(shape) for tensor, kind, shape in listed if tensor in wanted}
        found.append((name, weight, sizes))
    return found


def held(content):
    """The bytes of a tensor that says something."""
    return content if isinstance(content, bytes) else json.dumps(content).encode()


def filled(name, weight, sizes, numbers):
    """The parts of a weight: `numbers(size)` of each, but groups that there are where columns name theirs."""
    parts = {tensor: numbers(size) for tensor, size in sizes.items()}
    shapes = {role: shape for role, _, _, shape in weight.parts}
    for role, tensor, *_ in weight.parts:
        if role == "GroupIndex":
            (columns,) = shapes[role]
            index = torch.arange(columns, dtype=torch.int32) // (columns // shapes["Scale"][0])
            if name == SHUFFLED:
                index = index[torch.randperm(columns)]
            parts[tensor] = index.view(torch.uint8).to(place.TENSORS)
    return parts
