"""Random models, budgets, devices and behaviours: always the same bits, never above the budget.

The cases are seeded and drawn without a library, so that a failure is named by its number.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from attach_models import assert_same_state, host, same_bits, snapshot
from torch import nn

import weightstream
from weightstream import BudgetError
from weightstream.steps import ModelSteps

CASES = 150
_twice: dict[int, bool] = {}
"""Of each case that ran to its end: whether every unit that streams was copied at least twice."""


class Boom(Exception):
    """Raised in the middle of a forward."""


class Block(nn.Module):
    """Layers of odd sizes, in an order of use that need not be that of registration."""

    def __init__(self, draw: random.Random, dim: int) -> None:
        super().__init__()
        widths = [draw.choice([8, 24, 65, 130]) for _ in range(draw.randint(1, 3))]
        self.downs = nn.ModuleList(nn.Linear(dim, width, bias=draw.random() < 0.7) for width in widths)
        self.ups = nn.ModuleList(nn.Linear(width, dim) for width in widths)
        self.gain = nn.Parameter(torch.randn(dim)) if draw.random() < 0.5 else None
        self.norm = nn.LayerNorm(dim) if draw.random() < 0.5 else nn.Identity()
        self.order = list(range(len(widths)))
        if draw.random() < 0.3:
            draw.shuffle(self.order)
        self.register_buffer("count", torch.zeros(()) if draw.random() < 0.3 else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        for number in self.order:
            h = h + self.ups[number](torch.tanh(self.downs[number](h)))
        if self.count is not None:
            self.count.add_(1)
        return x + (h if self.gain is None else h * self.gain)


class Model(nn.Module):
    """Towers of unlike blocks with a base around them, run in the order it is told."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        dim = draw.choice([16, 40])
        self.stem = nn.Linear(4, dim)
        self.towers = nn.ModuleDict(
            {
                f"tower{number}": nn.ModuleList(Block(draw, dim) for _ in range(draw.randint(2, 6)))
                for number in range(draw.randint(1, 3))
            }
        )
        self.head = nn.Linear(dim, 4)
        self.fail_at = -1
        flat = [block for tower in self.towers.values() for block in tower]
        if draw.random() < 0.4:  # tie two layers of one shape
            one, other = draw.sample(flat, 2)
            layers = {layer.weight.shape: layer for layer in one.downs}
            for layer in other.downs:
                if layer.weight.shape in layers:
                    layer.weight = layers[layer.weight.shape].weight
                    break
        if draw.random() < 0.2:  # one block in two places
            next(iter(self.towers.values())).append(flat[0])

    def flat(self) -> list[Block]:
        return [block for tower in self.towers.values() for block in tower]

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        x = self.stem(x)
        blocks = self.flat()
        for position, number in enumerate(order):
            if position == self.fail_at:
                raise Boom
            x = blocks[number](x)
        return self.head(x)


def orders(draw: random.Random, count: int) -> list[list[int]]:
    """What each step runs: mostly all blocks in order, sometimes with skips, repeats or another order."""
    plain = list(range(count))
    found = []
    for _ in range(6):
        order = list(plain)
        kind = draw.random()
        if kind < 0.15:
            order = [number for number in order if draw.random() < 0.7]
        elif kind < 0.3:
            order.insert(draw.randrange(count), draw.randrange(count))
        elif kind < 0.4:
            draw.shuffle(order)
        found.append(order)
    return found


def play(model: Model, steps: list[list[int]], failures: list[int], x: torch.Tensor) -> list[torch.Tensor]:
    """The outputs of all steps; those that are to fail do so and are run again."""
    results = []
    for order, failure in zip(steps, failures):
        if 0 <= failure < len(order):
            model.fail_at = failure
            with pytest.raises(Boom), torch.inference_mode():
                model(x, order)
            model.fail_at = -1
        with torch.inference_mode():
            results.append(model(x, order))
    return results


def minimum(model: nn.Module, **settings: Any) -> int:
    """The least budget."""
    with pytest.raises(BudgetError, match="too small") as refused:
        weightstream.attach(model, budget=1, **settings)
    return int(re.search(r"at least (?:[^,]*\()?(\d+) bytes", str(refused.value))[1])


@pytest.mark.parametrize("case", range(CASES))
def test_any_model_under_any_budget(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(case)
    monkeypatch.setattr(ModelSteps, "everywhere", draw.random() < 0.7)
    torch.manual_seed(case)
    model = Model(draw).train(draw.random() < 0.5)
    x = torch.randn(draw.randint(1, 5), 4)
    steps = orders(draw, len(model.flat()))
    failures = [draw.randrange(8) if draw.random() < 0.2 else -1 for _ in steps]
    start = snapshot(model)
    expected = play(model, steps, failures, x)
    end = snapshot(model)
    model.load_state_dict(start)
    settings = {
        "device": host(
            draw.choice(["eager", "lazy", "random", "random"]), seed=case, granularity=draw.choice([4096, 4096, 8192])
        ),
        "look_ahead": draw.choice([None, None, 0, 1, 2, 7]),
        "towers": draw.choice([None, None, [list(dict.fromkeys(tower)) for tower in model.towers.values()]]),
    }
    least = minimum(model, **settings)
    whole = sum(p.nbytes for p in model.parameters())
    chosen = draw.choice([least, least + 4096, (least + whole) // 2, draw.randrange(least, 2 * whole + least)])
    budget = max(least, chosen)
    attachment = weightstream.attach(model, budget=budget, **settings)
    results = play(model, steps, failures, x)
    assert all(same_bits(*pair) for pair in zip(results, expected))
    report = attachment.report()
    assert report["engine"]["page_bytes_peak"] <= budget
    streamed = [unit["copies"] for unit in report["engine"]["units"] if unit["streamed_bytes"] > 0]
    _twice[case] = bool(streamed) and min(streamed) >= 2
    attachment.detach()
    assert_same_state(model, end)


def test_most_cases_stream_every_unit_twice(request: pytest.FixtureRequest) -> None:
    selected = sum(getattr(item, "function", None) is test_any_model_under_any_budget for item in request.session.items)
    if selected < CASES:
        pytest.skip(f"{selected} of {CASES} cases were asked for")
    assert len(_twice) == CASES, "some cases failed, or ran in another process"
    assert sum(_twice.values()) >= 0.8 * CASES
