"""Fused quantized matrices, split for models that have them apart."""

from __future__ import annotations


import pytest
import torch
from quant_files import corpus, int8_numbers, int8_parts, steps_apart
from quant_models import FILES
from torch import nn
from torch.nn import functional as F

from weightstream import offload
from weightstream.quant import QuantLinear, dequantize
from weightstream.quant.description import as_bytes, described
from weightstream.quant.selecting import selected


class Split(nn.Module):
    def __init__(self, width: int, rows: tuple[int, ...]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, count, bias=True, device="meta") for count in rows)


@pytest.mark.parametrize("name", [name for name in FILES[:-1] if name not in ("gptq-v2", "nvfp4-modelopt")])
def test_fused_weights_of_every_format_are_split(name: str) -> None:
    """Packed where rows lie apart, as numbers otherwise: the same numbers either way. Not those that a configuration names."""
    found, expected, ulps = corpus(name)
    kinds = set()
    for packed in found.packed.values():
        if len(packed.shape) != 2 or packed.shape[0] < 3 or 0 in packed.shape or packed.weight.transforms:
            continue
        third = packed.shape[0] // 3
        sizes = (third, third, packed.shape[0] - 2 * third)
        sd = {f"qkv.{local}": tensor for local, tensor in {**packed.parts, **packed.hints}.items()}
        sd["qkv.bias"] = torch.arange(float(packed.shape[0]))
        model = Split(packed.shape[1], sizes)
        split = {"qkv": {"mapped_modules": ["q", "k", "v"], "split_sizes": list(sizes)}}
        metadata = {f"qkv.{key}": text for key, text in packed.metadata.items()}
        source = offload.sources.Source("x", sd, metadata=metadata) if metadata else sd
        if metadata:
            continue  # a dictionary has none
        offload.load_model_data(model, source, fused_split_map=split, default_dtype=torch.float32)
        numbers = torch.cat([layer.weight + 0 for layer in (model.q, model.k, model.v)])
        assert steps_apart(numbers, expected[packed.name].reshape(packed.shape)) <= ulps, packed.name
        assert torch.equal(model.k.bias, sd["qkv.bias"][third : 2 * third])
        kinds.add(type(model.k))
    assert kinds <= {QuantLinear, nn.Linear}
    if name in ("fp8", "int8"):
        assert QuantLinear in kinds


def test_an_adapter_works_on_a_part_of_a_fused_weight() -> None:
    parts = int8_parts(48, 32, "qkv.weight")
    model = Split(32, (16, 16, 16))
    sd = {**parts, "qkv.bias": torch.zeros(48)}
    offload.load_model_data(model, sd, fused_split_map={"qkv": ["q", "k", "v"]}, default_dtype=torch.float32)
    x, down, up = torch.randn(2, 32), torch.randn(4, 32), torch.randn(16, 4)
    have = model.k(x) + F.linear(F.linear(x, down), up)
    want = F.linear(x, int8_numbers(parts, "qkv.weight")[16:32] + up @ down)
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FILES)
def test_rows_in_any_order_are_gathered_packed(name: str) -> None:
    """What an embedding does on a device, which alone knows the rows."""
    found, _, _ = corpus(name)
    gathered = 0
    for packed in found.packed.values():
        if len(packed.shape) != 2 or 0 in packed.shape:
            continue
        known = described(packed.weight.to_json())
        parts = [as_bytes(packed.parts[tensor]) for tensor in known.tensors]
        rows = torch.tensor([packed.shape[0] - 1, 0, 0, packed.shape[0] // 2])
        picked = selected(known, parts, rows)
        if picked is None:
            continue
        some, taken = picked
        have = dequantize(some.weight, taken)
        want = dequantize(packed.weight, parts)[rows]
        assert torch.equal(have.nan_to_num(7), want.nan_to_num(7)), packed.name
        gathered += 1
    none = ("awq", "bnb", "compressed-tensors-int", "experts", "gptq", "gptq-3bit", "gptq-v2", "nunchaku", "nvfp4")
    assert gathered or name in none
