"""Random sequences of loading, activating, stepping, attaching and detaching: the model always computes what it should."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from attach_models import host, run, same_bits, weight_bytes
from lora_models import Adapter, adapter, assert_close, inputs, merged, model, whole_differences
from test_lora_streaming import wide

import weightstream
from weightstream import BudgetError, offload
from weightstream.adapters.multipliers import at_step

BLOCKS = 6
KINDS = ("lora", "conv", "lokr", "dora", "diff", "loha of a high rank")


class Expected:
    """What is loaded and active."""

    def __init__(self) -> None:
        self.loaded: list[Adapter] = []
        self.active: list[tuple[int, tuple[float, ...]]] = []
        self.step = 0

    def applied(self) -> list[tuple[Adapter, float]]:
        found = [(self.loaded[number], at_step(values, self.step)) for number, values in self.active]
        # A decomposed adapter comes after all others of its layer, whatever the order.
        return [one for one in found if one[1] != 0.0 or any("dora" in key for key in one[0].tensors)]


@pytest.mark.parametrize("seed", range(6))
def test_a_random_sequence(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    made, x, now = model(blocks=BLOCKS), inputs(), Expected()
    plain = run(made, x)
    whole = merged(made)
    files = [adapter(kind, number, blocks=range(BLOCKS)) for number, kind in enumerate(KINDS)]
    files += [whole_differences(), wide(), adapter("lora", 9, blocks=[2])]
    paths = {id(one): one.write(tmp_path / f"{number}.safetensors") for number, one in enumerate(files)}
    attachment: Any = None

    def values(count: int) -> list[tuple[float, ...]]:
        return [tuple(choose.choice((0.0, 0.3, 0.7, 1.0)) for _ in range(choose.randint(1, 3))) for _ in range(count)]

    def load() -> None:
        chosen = choose.sample(files, choose.randint(0, 3))
        multipliers, active = values(len(chosen)), choose.random() < 0.8
        given = [list(one) for one in multipliers]
        try:
            offload.load_loras_into_model(made, [paths[id(one)] for one in chosen], given, active)
        except BudgetError:
            return
        now.loaded, now.step = chosen, 0
        now.active = list(enumerate(multipliers)) if active else []

    def activate() -> None:
        numbers = choose.sample(range(len(now.loaded)), choose.randint(0, len(now.loaded)))
        multipliers = values(len(numbers))
        try:
            offload.activate_loras(made, numbers, [list(one) for one in multipliers])
        except BudgetError:
            return
        now.active, now.step = list(zip(numbers, multipliers)), 0

    def step() -> None:
        now.step = choose.randint(0, 4)
        offload.set_step_no_for_lora(made, now.step)

    def attach_or_detach() -> None:
        nonlocal attachment
        if attachment is None:
            budget = int(weight_bytes(made) * choose.choice((0.6, 0.9, 1.5)))
            try:
                attachment = weightstream.attach(made, device=host("random", seed), budget=budget)
            except BudgetError:
                assert "_weightstream" not in made.__dict__
        else:
            attachment.detach()
            attachment = None

    def budget() -> None:
        if attachment is not None:
            try:
                attachment.set_budget(int(weight_bytes(made) * choose.choice((0.5, 0.8, 1.2))))
            except BudgetError:
                pass

    def unload() -> None:
        offload.unload_loras_from_model(made)
        now.__init__()

    for _ in range(30):
        choose.choice((load, load, activate, activate, step, step, step, attach_or_detach, budget, unload))()
        for _ in range(choose.randint(1, 2)):
            got = run(made, x)
        if now.applied():
            assert_close(got, run(merged(whole, *now.applied()), x), torch.zeros(0))
        else:
            assert same_bits(got, plain)
    if attachment is not None:
        attachment.detach()
    unload()
    assert same_bits(run(made, x), plain)
    assert all("forward" not in module.__dict__ for module in made.modules())
