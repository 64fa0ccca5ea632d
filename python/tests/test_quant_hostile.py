"""Descriptions that nobody could have written, over parts of any size: a typed error or numbers, never anything else."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from quant_files import corpus
from quant_models import FILES

from weightstream import QuantizationError
from weightstream.quant import QuantWeight

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
