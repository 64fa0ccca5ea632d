"""What the native module says of adapter files, and the numbers that it merges."""

from __future__ import annotations

import pytest
import torch

from weightstream import _native
from weightstream.errors import ModelError

LAYERS = [
    ("blocks.0.qkv", "linear", [24, 8], True),
    ("blocks.0.norm", "norm", [8], True),
    ("blocks.0.conv", "conv2d", [6, 4, 3, 3], True),
]


def plan(tensors: dict[str, list[int]], scalars: dict[str, float] | None = None, **options) -> _native.AdapterPlan:
    described = [(key, "F32", shape) for key, shape in tensors.items()]
    return _native.AdapterPlan(LAYERS, described, scalars or {}, {}, **options)


def memory(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def merged(target: _native.AdapterTarget, weight: torch.Tensor, parts: dict[str, torch.Tensor], strength: float):
    out = torch.empty_like(weight)
    target.merged(memory(weight), {role: memory(part) for role, part in parts.items()}, strength, memory(out))
    return out


def test_each_key_has_one_fate() -> None:
    made = plan(
        {
            "lora_unet_blocks_0_to_k.lora_down.weight": [2, 8],
            "lora_unet_blocks_0_to_k.lora_up.weight": [8, 2],
            "lora_unet_blocks_0_to_k.alpha": [],
            "blocks.0.norm.diff": [8],
            "blocks.0.norm.set_weight": [8],
            "blocks.3.norm.diff": [8],
            "blocks.0.conv.diff": [6, 4, 3, 2],
        },
        {"lora_unet_blocks_0_to_k.alpha": 1.0},
        ignore_variations=True,
    )
    lora, diff = sorted(made.targets(), key=lambda target: target.kind, reverse=True)
    assert (lora.layer, lora.kind, lora.rows, lora.rank, lora.scale) == ("blocks.0.qkv", "lora", (8, 16), 2, 0.5)
    assert lora.parts["up"] == ("lora_unet_blocks_0_to_k.lora_up.weight", None, None)
    assert (diff.layer, diff.kind, diff.cut, diff.columns, diff.axis) == ("blocks.0.norm", "diff", None, None, None)
    assert [keys for _, keys in made.absent()] == [["blocks.3.norm.diff"]]
    assert [key for key, _ in made.refused()] == ["blocks.0.norm.set_weight"]
    assert [key for key, _ in made.skipped()] == ["blocks.3.norm.diff", "blocks.0.conv.diff"]
    assert len(made.applied()) == 4 and "refused: 1 keys" in made.report() and made.notes() == []


def test_merged_weights_are_those_of_the_formulas() -> None:
    torch.manual_seed(0)
    weight, up, down = torch.randn(24, 8), torch.randn(24, 3), torch.randn(3, 8)
    keys = {"blocks.0.qkv.lora_A.weight": [3, 8], "blocks.0.qkv.lora_B.weight": [24, 3]}
    (lora,) = plan(keys).targets()
    expected = (weight.double() + 0.5 * (up.double() @ down.double())).float()
    torch.testing.assert_close(merged(lora, weight, {"up": up, "down": down}, 0.5), expected, rtol=0, atol=1e-6)

    (dora,) = plan({**keys, "blocks.0.qkv.dora_scale": [24, 1]}).targets()
    magnitude = torch.rand(24, 1) + 0.5
    base, whole = weight.double(), weight.double() + 0.5 * (up.double() @ down.double())
    old = base.norm(dim=1, keepdim=True)
    expected = ((old + 0.5 * (magnitude - old)) * whole / whole.norm(dim=1, keepdim=True)).float()
    got = merged(dora, weight, {"up": up, "down": down, "magnitude": magnitude}, 0.5)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)

    (change,) = plan({"blocks.0.qkv.diff_b": [24]}).targets()
    bias, out = torch.randn(24), torch.empty(24)
    change.merged_bias(memory(bias), {"diff": memory(bias)}, 2.0, memory(out))
    assert torch.equal(out, 3 * bias)


def test_what_cannot_be_read_or_computed_is_a_typed_error() -> None:
    with pytest.raises(ModelError, match="no kind of layer"):
        _native.AdapterPlan([("a", "lineer", [1, 1], False)], [], {}, {})
    with pytest.raises(ModelError, match="two layers named"):
        _native.AdapterPlan([("a", "linear", [1, 1], False)] * 2, [], {}, {})
    for options, what in [({"split": "["}, "split_linear_modules_map"), ({"config": "3"}, "adapter_config.json")]:
        with pytest.raises(ModelError, match=f"{what} cannot be read"):
            plan({}, **options)
    (lora,) = plan({"blocks.0.qkv.lora_A.weight": [3, 8], "blocks.0.qkv.lora_B.weight": [24, 3]}).targets()
    weight = torch.zeros(24, 8)
    with pytest.raises(ModelError, match='part "up"'):
        merged(lora, weight, {"down": torch.zeros(3, 8)}, 1.0)
    with pytest.raises(ModelError, match="has 20 numbers and needs 24"):
        merged(lora, weight, {"down": torch.zeros(20), "up": torch.zeros(24, 3)}, 1.0)
    with pytest.raises(ModelError, match="does not change its bias"):
        lora.merged_bias(memory(weight), {}, 1.0, memory(weight))
