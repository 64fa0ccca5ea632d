"""An attached model is not traced: a graph would read weights out of their turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from attach_models import attached, inputs, mlp, run, same_bits
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import weightstream


@pytest.fixture(autouse=True)
def hooks_as_before() -> Iterator[None]:
    """PyTorch leaves a hook on everybody's buffers behind when an export fails, at which later graphs break."""
    hooks = nn.modules.module._global_buffer_registration_hooks
    before = dict(hooks)
    yield
    hooks.clear()
    hooks.update(before)


def fake(model: nn.Module, x: torch.Tensor) -> object:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return model(x)


def fake_inputs(model: nn.Module, x: torch.Tensor) -> object:
    return model(FakeTensorMode(allow_non_fake_inputs=True).from_tensor(x))


def make_graph(mode: str) -> Callable[[nn.Module, torch.Tensor], object]:
    return lambda model, x: make_fx(model, tracing_mode=mode, _allow_non_fake_inputs=True)(x)


TRACERS = {
    "fake tensors": fake,
    "fake inputs": fake_inputs,
    "make_fx of values": make_graph("real"),
    "make_fx of fakes": make_graph("fake"),
    "make_fx of symbols": make_graph("symbolic"),
    "torch.fx": lambda model, x: torch.fx.symbolic_trace(model),
    "torch.jit": lambda model, x: torch.jit.trace(model, (x,), check_trace=False),
    "torch.export": lambda model, x: torch.export.export(model, (x,), strict=False),
}


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    ("tracer", "part"),
    [
        (name, part)
        for name in TRACERS
        for part in ("", "blocks.2")
        if not (part and name in ("torch.fx", "fake inputs"))
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tracing_is_refused_and_the_next_call_is_right(tracer: str, part: str, steps_before: int) -> None:
    model = mlp()
    x = inputs()
    expected = run(model, x)
    with attached(model, 0.5):
        for _ in range(steps_before):
            run(model, x)
        with pytest.raises(weightstream.StateError, match=r"traced|not where attach put it"), torch.no_grad():
            TRACERS[tracer](model.get_submodule(part), torch.ones(1, 64) if part else x)
        for _ in range(3):
            assert same_bits(run(model, x), expected)


def test_asking_whether_it_is_traced_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    with attached(model, 0.5):
        run(model, inputs())
    assert not [record for record in caplog.records if "torch.fx" in record.name]


def test_a_counting_mode_may_watch() -> None:
    model = mlp()
    x = inputs()
    expected = run(model, x)
    with attached(model, 0.5):
        for _ in range(3):
            with torch.no_grad(), FlopCounterMode(display=False) as counter:  # old ones count no inference mode
                assert same_bits(model(x), expected)
            assert counter.get_total_flops() > 0


def test_a_graph_of_a_blocks_parts_calls_them_in_turns_of_their_own() -> None:
    model = mlp()
    x, wide = inputs(), torch.ones(1, 64)
    expected, alone = run(model, x), run(model.blocks[2], wide)
    with attached(model, 0.5):
        graph = torch.fx.symbolic_trace(model.blocks[2])  # takes the class's forward, past the instance's
        for _ in range(3):
            assert same_bits(run(graph, wide), alone)
            assert same_bits(run(model, x), expected)
