"""Parts of blocks that are called while their block's turn is not open get a turn of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from attach_models import (
    DIM,
    AttentionBlock,
    MlpBlock,
    Towered,
    assert_same_state,
    attached,
    host,
    inputs,
    mlp,
    run,
    same_bits,
    snapshot,
    transformer,
)
from torch import nn
from torch.nn import functional as F

import weightstream

WIDE = torch.randn(2, 3, DIM, generator=torch.Generator().manual_seed(3))


@pytest.fixture(params=[True, False], ids=["cut everywhere", "cut where it pays"], autouse=True)
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightstream.steps.ModelSteps.everywhere", request.param)


@pytest.mark.parametrize("steps_before", [0, 1, 3])
@pytest.mark.parametrize("order", ["eager", "lazy", "random"])
def test_parts_of_a_block_called_alone(order: str, steps_before: int) -> None:
    model = transformer()
    x = inputs()
    block = model.blocks[2]
    parts = {name: part for name, part in block.named_modules() if name and not name.endswith("norm")}
    expected, whole = {}, run(model, x)
    for name, part in parts.items():
        expected[name] = run(part, WIDE if name != "mlp.down" else WIDE.repeat(1, 1, 4))
    with attached(model, 0.4, device=host(order)):
        for _ in range(steps_before):
            run(model, x)
        for _ in range(2):
            for name, part in parts.items():
                result = run(part, WIDE if name != "mlp.down" else WIDE.repeat(1, 1, 4))
                assert same_bits(result, expected[name]), name
            assert same_bits(run(model, x), whole)
        assert "forward" not in type(block).__dict__ or "forward" in block.__dict__


def test_a_method_that_is_no_forward() -> None:
    class Encoding(Towered):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = x + block.down(F.relu(block.up(x)))
            return x

    torch.manual_seed(0)
    model = Encoding([MlpBlock() for _ in range(6)])
    x = inputs()
    with torch.inference_mode():
        encoded, whole = model.encode(x), model(x)
        with attached(model, 0.4):
            for _ in range(3):
                assert same_bits(model.encode(x), encoded)
                assert same_bits(model(x), whole)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_forward_that_calls_parts_out_of_turn_from_a_later_step_on(at: int) -> None:
    class Switched(Towered):
        on = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            if self.on:
                x = x + self.blocks[0].mlp.down(self.blocks[0].mlp.up(x)) + self.blocks[3].out(x)
            return self.head(x)

    torch.manual_seed(0)
    model = Switched([AttentionBlock() for _ in range(5)]).eval()
    x = inputs()
    off = run(model, x)
    model.on = True
    on = run(model, x)
    state = snapshot(model)
    with attached(model, 0.5):
        for step in range(7):
            model.on = step >= at
            assert same_bits(run(model, x), on if model.on else off)
    assert_same_state(model, state)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_leaves_that_read_their_childrens_weights_called_alone() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, batch_first=True)
    model = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False).eval()
    attention = model.layers[3].self_attn
    whole, alone = run(model, WIDE), run(attention, WIDE, WIDE, WIDE)
    with attached(model, 0.6):
        for _ in range(3):
            assert same_bits(run(attention, WIDE, WIDE, WIDE)[0], alone[0])
            assert same_bits(run(model, WIDE), whole)


def test_errors_inside_a_part_leave_the_net_in_place() -> None:
    model = mlp()
    x = inputs()
    whole, alone = run(model, x), run(model.blocks[2].up, WIDE)
    with attached(model, 0.4):
        for _ in range(3):
            with pytest.raises(RuntimeError):
                run(model.blocks[2].up, torch.ones(1, 3))
            with pytest.raises(RuntimeError):
                run(model.blocks[2], torch.ones(1, 3))
            assert same_bits(run(model.blocks[2].up, WIDE), alone)
            assert same_bits(run(model, x), whole)


def test_a_forward_that_somebody_sets_on_a_part_stays() -> None:
    model = mlp()
    x = inputs()
    before = run(model, x)
    with attached(model, 0.4):
        run(model, x)
        part = model.blocks[1].up
        inner = part.forward
        part.forward = lambda x: 2 * inner(x)
        changed = run(model, x)
        assert not same_bits(changed, before)
        for _ in range(3):
            assert same_bits(run(model, x), changed)
        del part.forward
        for _ in range(3):
            assert same_bits(run(model, x), before)


class Yielding(MlpBlock):
    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield super().forward(x)


class Awaited(MlpBlock):
    async def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Streaming(MlpBlock):
    async def forward(self, x: torch.Tensor) -> AsyncIterator[torch.Tensor]:
        yield super().forward(x)


class Wrapped(MlpBlock):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Yielding()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner.forward(x)


class Drained(Towered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            (x,) = block(x)
        return self.head(x)


@pytest.mark.parametrize("kind", [Yielding, Awaited, Streaming])
def test_blocks_whose_body_runs_after_their_turn_are_refused(kind: type[nn.Module]) -> None:
    model = Drained([kind() for _ in range(5)])
    state = snapshot(model)
    with pytest.raises(weightstream.ModelError, match=r"blocks\.0.*after its call"):
        weightstream.attach(model, device=host())
    assert_same_state(model, state)


def test_a_block_that_returns_a_generator_is_refused_in_the_first_step() -> None:
    model = Drained([Wrapped() for _ in range(5)])
    with attached(model, 0.5), pytest.raises(weightstream.ModelError, match=r"generator"):
        run(model, inputs())


def test_a_generator_inside_a_block_is_drained_in_its_turn() -> None:
    class Inside(MlpBlock):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Yielding()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(next(self.inner(x)))

    torch.manual_seed(0)
    model = Towered([Inside() for _ in range(5)])
    x = inputs()
    expected = run(model, x)
    with attached(model, 0.5):
        for _ in range(3):
            assert same_bits(run(model, x), expected)
