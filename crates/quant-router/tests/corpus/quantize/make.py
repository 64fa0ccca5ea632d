"""Makes the file of this folder: weights of floats, and what optimum-quanto makes of them.

Each case is a tensor `in.CASE` and, for each type that quanto gives it, the tensors `KIND.CASE._data`, `._data._data`, `._scale` and
`._shift`. The numbers are those of quanto's own classes, before it orders them for a kernel of some device. Run in an environment
with torch, optimum-quanto and safetensors:

    python make.py [folder]
"""

import sys
from pathlib import Path

import torch
from optimum.quanto import AbsmaxOptimizer, MaxOptimizer, qfloat8_e4m3fn, qfloat8_e5m2, qint2, qint4, qint8
from optimum.quanto.tensor.weights.quantization import quantize_weight
from safetensors.torch import save_file

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
KINDS = (qint8, qfloat8_e4m3fn, qfloat8_e5m2, qint4, qint2)
random = torch.Generator().manual_seed(20240811)


def normal(*shape):
    return torch.randn(shape, generator=random)


def group_size(weight):
    """As quanto's modules choose it."""
    columns = weight.numel() // weight.shape[0]
    if columns <= 128:
        return None
    return next((size for size in (128, 96, 64, 32) if columns % size == 0), None)


def extremes(dtype, columns):
    """Rows that make trouble: zeros, what is no number, infinities, the largest and smallest numbers, and halves of a step."""
    rows = normal(13, columns).to(dtype)
    limits = torch.finfo(dtype)
    rows[0] = 0
    rows[1, 1] = float("nan")
    rows[2, 0], rows[2, 2] = float("inf"), float("-inf")
    rows[3] = limits.max
    rows[3, 1] = limits.min
    rows[4] = rows[4] * limits.smallest_normal
    rows[5] = limits.smallest_normal / 4
    rows[6] = 1 + torch.arange(columns) % 2
    rows[7] = (torch.arange(columns) % 255 - 127) / 2
    rows[7, 0] = -127
    rows[8] = 448 - torch.arange(columns) % 449
    rows[9] = -rows[9].abs() - 3
    rows[10, 0] = float("inf")
    rows[11] *= 1e-3
    rows[12] = -limits.smallest_normal * limits.eps * 184  # Its scale is rounded to the smallest number: quotients of -184.
    return rows


def cases(dtype):
    shapes = {
        "odd": (7, 5), "column": (6, 1), "pair": (2, 3), "row": (1, 70), "whole": (33, 128), "ninetysix": (4, 192),
        "thirtytwo": (5, 160), "undivided": (3, 1003), "long": (3, 2048), "convolution": (6, 5, 3, 3), "groups": (1, 384),
    }
    for name, shape in shapes.items():
        yield name, normal(*shape).to(dtype)
    for columns in (5, 64, 96 * 3):
        yield f"extremes{columns}", extremes(dtype, columns)


def main():
    tensors = {}
    for name, dtype in DTYPES.items():
        for case, weight in cases(dtype):
            case = f"{name}.{case}"
            tensors[f"in.{case}"] = weight
            for kind in KINDS:
                key = f"{kind.name}.{case}"
                if kind.bits == 8:
                    scale = AbsmaxOptimizer()(weight, qtype=kind, axis=0)
                    quantized = quantize_weight(weight, kind, 0, scale, optimized=False)
                    tensors |= {f"{key}._data": quantized._data, f"{key}._scale": quantized._scale}
                    continue
                size = group_size(weight)
                if weight.numel() == (size or weight.numel() // weight.shape[0]):
                    continue  # A single group is refused: quanto's ranges are then by column.
                scale, shift = MaxOptimizer()(weight, qtype=kind, axis=0, group_size=size)
                quantized = quantize_weight(weight, kind, 0, scale, shift, group_size=size, optimized=False)
                tensors |= {
                    f"{key}._data._data": quantized._data._data.flatten(1),
                    f"{key}._scale": quantized._scale.flatten(1),
                    f"{key}._shift": quantized._shift.flatten(1),
                }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, FOLDER / "quanto.safetensors")


main()
