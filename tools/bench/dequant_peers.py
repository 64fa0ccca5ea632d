"""What the bench `dequant` puts beside the kernels: PyTorch's operators, and libraries that are installed.

`of` gives, for a format, names and functions; such a function takes a weight's parts as bytes and gives what is timed.
"""

import functools
import importlib.util

import torch


def of(name, weight):
    """What decodes this format besides."""
    found = {}
    scale = {
        "FP8, one scale": (torch.float8_e4m3fn, ()),
        "FP8 E5M2, a scale a row": (torch.float8_e5m2, (-1, 1)),
        "INT8, a scale a row": (torch.int8, (-1, 1)),
    }.get(name)
    if scale is not None:
        found["PyTorch"] = functools.partial(times_scale, weight, *scale)
    if name == "FP8, 128 x 128":
        found["PyTorch"] = functools.partial(times_blocks, weight)
    if name == "bitsandbytes NF4":
        found["PyTorch"] = functools.partial(codebook, weight)
        if importlib.util.find_spec("bitsandbytes"):
            found["bitsandbytes"] = functools.partial(bitsandbytes, weight)
    if name.startswith("GPTQ, 4 bits by"):
        found["PyTorch"] = functools.partial(words, weight)
    if name in diffusers_types():
        found["diffusers"] = functools.partial(diffusers, name, weight)
    return found


def part(weight, parts, role):
    """A weight's part by its role."""
    (tensor,) = (tensor for found, tensor, *_ in weight.parts if found == role)
    return parts[tensor]


def times_scale(weight, dtype, shape, parts):
    """Numbers times a scale, in bf16 as models write it."""
    data = part(weight, parts, "Data").view(dtype).view(weight.shape)
    scale = part(weight, parts, "Scale").view(torch.float32).reshape(shape)
    return lambda: data.to(torch.bfloat16) * scale.to(torch.bfloat16)


def times_blocks(weight, parts):
    """As before, with a scale a block."""
    rows, columns = weight.shape
    data = part(weight, parts, "Data").view(torch.float8_e4m3fn).view(rows // 128, 128, columns // 128, 128)
    scale = part(weight, parts, "Scale").view(torch.float32).view(rows // 128, 1, columns // 128, 1)
    return lambda: (data.to(torch.bfloat16) * scale.to(torch.bfloat16)).view(rows, columns)


def words(weight, parts):
    """Numbers of 4 bits shifted out of words, less a zero point and times a scale by their group: as GPTQ's libraries do in PyTorch."""
    rows, columns = weight.shape
    data = part(weight, parts, "Data").view(torch.int32).view(columns // 8, 1, rows)
    zero = part(weight, parts, "ZeroPoint").view(torch.int32).view(-1, rows // 8, 1)
    scale = part(weight, parts, "Scale").view(torch.float16).view(-1, rows).bfloat16()
    group = part(weight, parts, "GroupIndex").view(torch.int32)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=data.device)

    def run():
        codes = ((data >> shifts[None, :, None]) & 15).view(columns, rows)
        less = ((zero >> shifts) & 15).view(-1, rows) + 1
        return (scale[group] * (codes - less[group])).T.contiguous()

    return run


def codebook(weight, parts):
    """Nibbles as indexes of a table, times the scale of their block."""
    data, table = part(weight, parts, "Data"), part(weight, parts, "Codebook").view(torch.float32).bfloat16()
    scale = part(weight, parts, "Scale").view(torch.float32)

    def run():
        indexes = torch.stack((data >> 4, data & 15), dim=-1).view(-1).int()
        return (table[indexes].view(-1, 64) * scale[:, None].bfloat16()).view(weight.shape)

    return run


def bitsandbytes(weight, parts):
    """The library whose format it is."""
    import bitsandbytes.functional as functional

    state = functional.QuantState(
        absmax=part(weight, parts, "Scale").view(torch.float32),
        shape=torch.Size(weight.shape),
        code=part(weight, parts, "Codebook").view(torch.float32),
        blocksize=64,
        quant_type="nf4",
        dtype=torch.bfloat16,
    )
    data = part(weight, parts, "Data").view(-1, 1)
    return lambda: functional.dequantize_4bit(data, state)


@functools.cache
def diffusers_types():
    """The types of ggml that diffusers decodes with PyTorch's operators."""
    try:
        from diffusers.quantizers.gguf import utils
    except ImportError:
        return frozenset()
    return frozenset(kind.name for kind in utils.dequantize_functions)


def diffusers(name, weight, parts):
    """Blocks by PyTorch's operators, as diffusers writes them."""
    import gguf
    from diffusers.quantizers.gguf import utils

    kind = gguf.GGMLQuantizationType[name]
    decode, (block, type_size) = utils.dequantize_functions[kind], gguf.GGML_QUANT_SIZES[kind]
    blocks = part(weight, parts, "Data").view(-1, type_size)
    return lambda: decode(blocks, block, type_size, dtype=torch.bfloat16).reshape(weight.shape)
