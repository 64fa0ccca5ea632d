"""Descriptions that nobody could have written, over parts of any size, and indexes that lead nowhere: a typed error or numbers, never
anything else."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_files import write
from quant_files import corpus
from quant_models import FILES
from torch import Tensor, nn

from weightstream import QuantizationError, offload
from weightstream.quant import QuantLinear, QuantWeight
from weightstream.quant.ops import dequantize

NUMBERS = [0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 2**31, 2**32, 2**62, 2**63, 2**64 - 1]


def changed(value: Any, chance: random.Random) -> Any:
    """The value with something in it changed."""
    if isinstance(value, dict):
        return {key: changed(one, chance) if chance.random() < 0.4 else one for key, one in value.items()}
    if isinstance(value, list):
        made = [changed(one, chance) if chance.random() < 0.4 else one for one in value]
        if made and chance.random() < 0.2:
            made = made[:-1] if chance.random() < 0.5 else [*made, chance.choice(made)]
        return made
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice(NUMBERS) if chance.random() < 0.5 else max(0, value + chance.choice([-1, 1]))
    return value


@pytest.mark.parametrize("name", FILES)
def test_any_description_is_refused_or_computed(name: str) -> None:
    chance = random.Random(name)
    weights = [(packed.weight.to_json(), packed.parts) for packed in corpus(name)[0].packed.values()]
    target = torch.zeros(1 << 16)
    computed = refused = 0
    for _ in range(1500):
        text, parts = chance.choice(weights)
        try:
            weight = QuantWeight.from_json(json.dumps(changed(json.loads(text), chance)))
        except QuantizationError:
            refused += 1
            continue
        sizes = {tensor: (part.data_ptr(), part.nbytes) for tensor, part in parts.items()}
        if chance.random() < 0.5:
            for tensor in sizes:
                sizes[tensor] = (target.data_ptr(), chance.choice([0, 1, 2, 4, 8, 64, 128, 512, 4096]))
        rows = chance.choice([(0, 0), (0, 1), (1, 3), (0, min(weight.rows, 100)), (5, 2)])
        count = (rows[1] - rows[0]) * weight.columns
        count = count if 0 <= count <= target.numel() else 0
        try:
            weight.dequantize(sizes, [rows], target.data_ptr(), count * 4, "F32")
            computed += 1
        except QuantizationError:
            refused += 1
    assert computed and refused


def ordered(kind: str) -> tuple[dict[str, Tensor], str]:
    """The tensors of a layer `deep.lin` of 64 rows and 128 columns in 4 groups, and which of them names the groups."""
    torch.manual_seed(0)
    words = {"dtype": torch.int32}
    index = (torch.arange(128, **words) * 7) % 4
    if kind == "compressed-tensors":
        made = {
            "weight_packed": torch.randint(-(2**31), 2**31 - 1, (64, 16), **words),
            "weight_scale": torch.rand(64, 4).to(torch.bfloat16),
            "weight_shape": torch.tensor([64, 128]),
            "weight_g_idx": index,
        }
    else:
        size = (16, 64) if kind == "gptq" else (128, 8)
        made = {
            "qweight": torch.randint(-(2**31), 2**31 - 1, size, **words),
            "qzeros": torch.randint(-(2**31), 2**31 - 1, (4, 8), **words),
            "scales": torch.rand(4, 64).half(),
            "g_idx": index,
        }
    return {f"deep.lin.{name}": tensor for name, tensor in made.items()}, f"deep.lin.{list(made)[-1]}"


def deep() -> nn.ModuleDict:
    return nn.ModuleDict({"deep": nn.ModuleDict({"lin": nn.Linear(128, 64, bias=False)})})


@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed-tensors"])
@pytest.mark.parametrize(("column", "group"), [(0, -1), (77, 4), (127, 2**31 - 1), (5, -(2**31))])
def test_an_index_of_groups_that_there_are_not_is_refused_by_name(
    kind: str, column: int, group: int, tmp_path: Path
) -> None:
    tensors, index = ordered(kind)
    good = deep()
    offload.load_model_data(good, dict(tensors))
    assert isinstance(good["deep"]["lin"], QuantLinear) and bool((good["deep"]["lin"].weight + 0).isfinite().all())
    tensors[index] = tensors[index].clone()
    tensors[index][column] = group
    model = deep()
    kept, numbers = model["deep"]["lin"], model["deep"]["lin"].weight.detach().clone()
    said = (
        rf'"{index}" of "deep\.lin\.weight" puts column {column} in group {group}; there are 4 groups, counted from 0'
    )
    for source in (write(tmp_path / "x.safetensors", tensors), dict(tensors)):
        with pytest.raises(QuantizationError, match=said):
            offload.load_model_data(model, source)
        assert model["deep"]["lin"] is kept and torch.equal(kept.weight, numbers)
    # A fused matrix whose rows are not apart becomes numbers before there is a layer.
    halves = nn.ModuleDict({"deep": nn.ModuleDict({half: nn.Linear(128, 32, bias=False) for half in "ab"})})
    with pytest.raises(QuantizationError, match=said):
        offload.load_model_data(halves, dict(tensors), fused_split_map={"lin": ["a", "b"]})
    # Into a layer that is packed already.
    layer, before = good["deep"]["lin"], {name: part.clone() for name, part in good.state_dict().items()}
    given = {name: tensor for name, tensor in tensors.items() if not name.endswith("weight_shape")}
    with pytest.raises(RuntimeError, match=said):
        good.load_state_dict(given, strict=False)
    assert good["deep"]["lin"] is layer
    assert all(torch.equal(part, before[name]) for name, part in good.state_dict().items())
    # And where parts are given to the decoder as they are.
    parts = [given[f"deep.lin.{tensor}"] for _, tensor, *_ in layer.quant_weight.parts]
    with pytest.raises(QuantizationError, match=f"puts column {column} in group {group}"):
        dequantize(layer.quant_weight, parts)
