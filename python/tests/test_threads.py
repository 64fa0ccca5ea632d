"""Two models in two threads work; one model in two threads, or in a forked child, is a typed error."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from attach_models import Towered, attached, host, inputs, mlp, run, same_bits, transformer, weight_bytes
from torch import nn

import weightstream
from weightstream import StateError


def test_two_models_in_two_threads() -> None:
    models = [transformer(5, seed=1), mlp(7, seed=2)]
    expected = [run(model, inputs()) for model in models]
    failures: list[BaseException] = []

    def work(model: nn.Module, want: torch.Tensor) -> None:
        try:
            attachment = weightstream.attach(model, device=host(), budget=int(weight_bytes(model) * 0.5))
            for _ in range(15):
                assert same_bits(run(model, inputs()), want)
            attachment.detach()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(models, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def _elsewhere(call) -> BaseException | None:  # noqa: ANN001
    """Runs it on another thread and gives what it raised."""
    raised: list[BaseException | None] = [None]

    def work() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001
            raised[0] = error

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return raised[0]


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("part", ["root", "same block", "other block", "inner"])
def test_a_second_thread_is_refused_and_the_first_goes_on(steps: int, part: str) -> None:
    class Meeting(nn.Linear):
        meet = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.meet is not None:
                self.meet()
            return super().forward(x)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), Meeting(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    torch.manual_seed(0)
    model = Towered([Block() for _ in range(6)])
    x, hidden = inputs(), torch.randn(2, 5, 64)
    expected = run(model, x)
    with attached(model, 0.5):
        for _ in range(steps):
            run(model, x)
        calls = {
            "root": lambda: run(model, x),
            "same block": lambda: run(model.blocks[2], hidden),
            "other block": lambda: run(model.blocks[4], hidden),
            "inner": lambda: run(model.blocks[2].first, hidden),
        }
        raised: list[BaseException | None] = []

        def meet() -> None:
            model.blocks[2].second.meet = None
            raised.append(_elsewhere(calls[part]))

        model.blocks[2].second.meet = meet
        assert same_bits(run(model, x), expected)
        if part == "inner" and steps == 0:
            return  # no wrapper sees a part of a whole block
        assert isinstance(raised[0], StateError) and "thread" in str(raised[0]), raised
        assert same_bits(run(model, x), expected)


def test_threads_may_take_turns() -> None:
    model = transformer()
    expected = run(model, inputs())
    with attached(model, 0.5):
        for _ in range(3):
            assert _elsewhere(lambda: run(model, inputs())) is None
            assert same_bits(run(model, inputs()), expected)


def test_a_step_lost_with_its_thread_does_not_lock_the_others_out() -> None:
    model = transformer()
    expected = run(model, inputs())
    with attached(model, 0.5) as attachment:
        run(model, inputs())
        runtime = attachment._runtime

        def lose() -> None:
            runtime.thread = threading.get_ident()
            runtime.open.append(-1)
            runtime.offloader.begin_step(0)

        assert _elsewhere(lose) is None
        assert same_bits(run(model, inputs()), expected)


def test_a_forked_child_is_refused() -> None:
    model = mlp()
    expected = run(model, inputs())
    with attached(model, 0.5):
        run(model, inputs())
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(model, inputs())
            except StateError as error:
                code = 0 if "forked child" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert same_bits(run(model, inputs()), expected)


def test_data_parallel_replicas_are_refused() -> None:
    model = mlp()
    with attached(model):
        with pytest.raises(StateError, match="DataParallel"):
            model.blocks[1]._replicate_for_data_parallel()
