"""Any exit from a forward leaves a model whose next call is right; the first error is the one that is seen."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest
import torch
from attach_models import Towered, attached, host, inputs, mlp, run, same_bits, transformer
from torch import nn

import weightstream
from weightstream import StateError

ERRORS = {
    "value": ValueError("wrong"),
    "memory": torch.OutOfMemoryError("none left"),
    "interrupt": KeyboardInterrupt(),
    "exit": SystemExit(3),
}


class Failing:
    """Raises when the n-th call arrives, once armed."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.after = 0

    def arm(self, error: BaseException, after: int) -> None:
        self.error, self.after = error, after

    def __call__(self, *_: object) -> None:
        if self.error is not None:
            self.after -= 1
            if self.after < 0:
                error, self.error = self.error, None
                raise error


def _in_block(model: Towered, failing: Failing) -> None:
    inner = model.blocks[3].norm.forward
    model.blocks[3].norm.forward = lambda x: (failing(), inner(x))[1]


def _between(model: Towered, failing: Failing) -> None:
    model.register_buffer("unused", torch.zeros(1))
    inner = model.head.forward
    model.head.forward = lambda x: (failing(), inner(x))[1]


def _user_hook(model: Towered, failing: Failing) -> None:
    model.blocks[3].register_forward_hook(lambda *_: failing())


PLACES: dict[str, Callable[[Towered, Failing], None]] = {
    "inside a block": _in_block,
    "behind the blocks": _between,
    "in a user's hook": _user_hook,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("step", [0, 1, 2])
def test_the_next_call_is_right(place: str, error: str, step: int) -> None:
    model = transformer(6)
    failing = Failing()
    PLACES[place](model, failing)
    x = inputs()
    expected = run(model, x)
    with attached(model, 0.5) as attachment:
        for _ in range(step):
            run(model, x)
        pages = attachment.report()["engine"]["page_bytes_in_use"]
        failing.arm(ERRORS[error], 0)
        with pytest.raises(type(ERRORS[error])) as raised:
            run(model, x)
        assert raised.value is ERRORS[error]
        for _ in range(3):
            assert same_bits(run(model, x), expected)
        assert attachment.report()["engine"]["page_bytes_in_use"] == pages


def test_fifty_failures_grow_nothing() -> None:
    model = transformer(6)
    failing = Failing()
    _in_block(model, failing)
    x = inputs()
    expected = run(model, x)
    kinds = list(ERRORS.values())
    with attached(model, 0.5) as attachment:
        run(model, x)
        pages = attachment.report()["engine"]["page_bytes_in_use"]
        for number in range(50):
            error = kinds[number % len(kinds)]
            failing.arm(error, number % 2)
            with pytest.raises(type(error)):
                for _ in range(2):
                    run(model, x)
            assert same_bits(run(model, x), expected)
            assert attachment.report()["engine"]["page_bytes_in_use"] == pages
            assert attachment._runtime.open == []


def test_an_error_of_a_block_called_alone() -> None:
    model = transformer(6)
    failing = Failing()
    _in_block(model, failing)
    hidden = torch.randn(2, 5, 64)
    x = inputs()
    expected, whole = run(model.blocks[3], hidden), run(model, x)
    with attached(model, 0.5):
        for _ in range(3):
            failing.arm(ValueError("wrong"), 0)
            with pytest.raises(ValueError, match="wrong"):
                run(model.blocks[3], hidden)
            assert same_bits(run(model.blocks[3], hidden), expected)
            assert same_bits(run(model, x), whole)


def test_real_interrupts_while_waiting_for_copies() -> None:
    torch.manual_seed(0)
    model = mlp(12)
    x = inputs()
    expected = run(model, x)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with attached(model, 0.3, device=host("lazy", bandwidth=100_000_000)) as attachment:
            run(model, x)
            for number in range(40):
                with pytest.raises(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, 0.0005 * (number % 20 + 1))
                    while True:
                        run(model, x)
                assert same_bits(run(model, x), expected)
            assert attachment.stats()["recoveries"] > 0
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("where", ["root", "block"])
def test_an_exit_that_was_lost_is_made_good(where: str) -> None:
    """An interrupt between two bytecodes can skip an exit: the marks it leaves behind are found to be stale."""
    model = transformer(4)
    x, hidden = inputs(), torch.randn(2, 5, 64)
    expected, alone = run(model, x), run(model.blocks[1], hidden)
    with attached(model, 0.5) as attachment:
        run(model, x)
        runtime = attachment._runtime
        for _ in range(3):
            runtime.thread = threading.get_ident()
            if where == "root":
                runtime.open.append(-1)
                runtime.offloader.begin_step(0)
            unit = attachment._runtime.unit_of[attachment._ownership.blocks[1].tensors[2]]
            runtime.open.append(unit)
            runtime.offloader.enter(unit, 0)
            if where == "root":
                assert same_bits(run(model, x), expected)
            else:
                assert same_bits(run(model.blocks[1], hidden), alone)
                assert same_bits(run(model, x), expected)
            assert runtime.open == []


def test_detach_inside_a_forward_is_refused_and_after_an_error_works() -> None:
    model = mlp()
    x = inputs()
    expected = run(model, x)
    attachment = weightstream.attach(model, device=host(), budget="400KiB")
    inner = model.head.forward
    model.head.forward = lambda h: (attachment.detach(), inner(h))[1]
    with pytest.raises(StateError, match="while the model is running"):
        run(model, x)
    model.head.forward = inner
    attachment.detach()
    del model.head.forward
    assert same_bits(run(model, x), expected)


def test_a_generator_that_is_closed_early() -> None:
    class Yielding(Towered):
        def stream(self, x: torch.Tensor):  # noqa: ANN202
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
                yield x

    torch.manual_seed(0)
    model = Yielding([nn.Linear(64, 64) for _ in range(6)])
    x = inputs()
    expected = run(model, x)
    with attached(model, 0.6):
        for _ in range(3):
            with torch.inference_mode():
                steps = model.stream(x)
                next(steps), next(steps)
                steps.close()
            assert same_bits(run(model, x), expected)
