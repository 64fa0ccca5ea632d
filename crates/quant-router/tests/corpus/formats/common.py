"""What the scripts of this folder share: where files go, random numbers, and how a file is written."""

import json
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


def seeded(make, seed):
    """A maker that draws its own numbers, whatever ran before."""

    def run():
        random.manual_seed(seed)
        make()

    return run
