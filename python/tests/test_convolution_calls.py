"""The convolution route at calls: what it refuses, and where weights are after errors, interrupts and removal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from convolution_models import Net, enable, image, net, state
from dynamic_models import resident
from torch import Tensor, nn

from weightstream import dynamic_offload as ddo


@pytest.fixture
def offloaded() -> Net:
    model = net()
    enable(model)
    return model


def test_calls_that_are_refused(offloaded: Net) -> None:
    x, before = image(), state(offloaded)
    with pytest.raises(RuntimeError, match="inference_mode"):
        offloaded(x)
    with torch.no_grad(), pytest.raises(RuntimeError, match="inference_mode"):
        offloaded(x)
    with torch.inference_mode():
        offloaded.flat.train()
        with pytest.raises(RuntimeError, match="training mode"):
            offloaded(x)
        offloaded.flat.eval()
        for arguments in ((), (None,), ([x],)):
            with pytest.raises(ValueError, match="not a tensor"):
                offloaded.flat(*arguments)
        with pytest.raises(ValueError, match="not a tensor"):
            offloaded.flat(other=x)
        with pytest.raises(ValueError, match="is on meta"):
            offloaded.flat(x.to("meta"))
        expected = offloaded.flat(x)
        assert torch.equal(offloaded.flat(input=x), expected)
        assert torch.equal(offloaded.scaled(x=expected), offloaded.scaled(expected))
    assert state(offloaded) == before


def test_a_compiled_call_is_refused(offloaded: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match="compiled"):
        resident(offloaded, image())


class Odd(nn.Conv1d):
    """Does what a test says in its forward."""

    act: Callable[[Odd, Tensor], Any] = staticmethod(lambda layer, x: nn.Conv1d.forward(layer, x))

    def forward(self, x: Tensor) -> Any:
        return self.act(self, x)


def odd(act: Callable[[Odd, Tensor], Any]) -> nn.Sequential:
    torch.manual_seed(0)
    layer = Odd(2, 2, 1)
    layer.__dict__["act"] = act
    model = nn.Sequential(layer).eval()
    enable(model)
    return model


LINE = torch.zeros(1, 2, 4)


@pytest.mark.parametrize(
    "act",
    [
        lambda layer, x: layer.weight,
        lambda layer, x: layer.weight.data.view(-1)[:2],
        lambda layer, x: (x, [layer.weight.mT]),
        lambda layer, x: {"out": {"deep": layer.weight[0]}},
    ],
)
def test_an_output_that_is_the_weight_is_refused(act: Callable[[Odd, Tensor], Any]) -> None:
    model = odd(act)
    before = state(model)
    with pytest.raises(RuntimeError, match="returned its own weight"):
        resident(model, LINE)
    assert state(model) == before


def test_a_forward_that_changes_its_weight_is_refused() -> None:
    model = odd(lambda layer, x: layer.weight.add_(1).sum() + x)
    before = state(model)
    with pytest.raises(RuntimeError, match="changed its weight"):
        resident(model, LINE)
    assert state(model) == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_sources_are_back_after_an_error(error: type[BaseException]) -> None:
    seen = []

    def act(layer: Odd, x: Tensor) -> Any:
        seen.append(layer.weight.data_ptr())
        raise error

    model = odd(act)
    before = state(model)
    with pytest.raises(error):
        resident(model, LINE)
    assert state(model) == before and seen[0] != before["0.weight"][1], "it ran with a copy"
    model[0].__dict__["act"] = lambda layer, x: nn.Conv1d.forward(layer, x)
    resident(model, LINE)
    ddo.remove_dynamic_offload(model)
    assert state(model)["0.weight"] == before["0.weight"]


def test_an_interrupt_while_weights_are_put_back_does_not_leave_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightstream.dynamic_offload.convolution_calls import Call

    model = odd(Odd.act)
    before, good = state(model), Call._put_back
    left = [2]

    def interrupted(call: Call) -> None:
        if left[0]:
            left[0] -= 1
            raise KeyboardInterrupt
        good(call)

    monkeypatch.setattr(Call, "_put_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resident(model, LINE)
    assert state(model) == before
    monkeypatch.undo()
    resident(model, LINE)


def test_reentry_is_refused() -> None:
    model = odd(lambda layer, x: layer(x))
    with pytest.raises(RuntimeError, match="while it runs"):
        resident(model, LINE)
    inside, go = threading.Event(), threading.Event()
    model[0].__dict__["act"] = lambda layer, x: (inside.set(), go.wait(), x)[2]
    thread = threading.Thread(target=lambda: resident(model, LINE))
    thread.start()
    inside.wait()
    with pytest.raises(RuntimeError, match="while it runs"):
        resident(model, LINE)
    go.set()
    thread.join()
    resident(model, LINE)


def test_removal_in_a_running_forward_is_refused_and_works_afterwards() -> None:
    def act(layer: Odd, x: Tensor) -> Tensor:
        with pytest.raises(RuntimeError, match="cannot be removed while"):
            ddo.remove_dynamic_offload(model)
        return nn.Conv1d.forward(layer, x)

    torch.manual_seed(0)
    model = odd(act)
    before = state(model)["0.weight"]
    resident(model, LINE)
    ddo.remove_dynamic_offload(model)
    assert state(model)["0.weight"] == before and "forward" not in model[0].__dict__


def test_arguments_reach_the_forward_as_they_are() -> None:
    seen: list[Any] = []
    layer = nn.Conv1d(2, 2, 1)
    layer.__dict__["forward"] = lambda *args, **kwargs: seen.append((args, kwargs))
    model = nn.Sequential(layer).eval()
    own = layer.__dict__["forward"]
    enable(model)
    marker = object()
    with torch.inference_mode():
        layer(LINE, marker, extra=marker)
    ((args, kwargs),) = seen
    assert args[0] is LINE and args[1] is marker and kwargs == {"extra": marker}
    ddo.remove_dynamic_offload(model)
    assert layer.__dict__["forward"] is own
