"""Planning again by what a step was measured to compute: when it is worth it, and that nothing else changes."""

from __future__ import annotations

import time

import pytest
import torch
from attach_models import DIM, MlpBlock, Towered, host, same_bits
from torch import nn

import weightstream
from weightstream import BudgetError
from weightstream.division import Division
from weightstream.pacing import Pacing


class Engine:
    """An engine that only answers what planning again would bring."""

    def __init__(self, *gains) -> None:
        self.gains = list(gains)
        self.timed = 0

    def time_next_step(self) -> None:
        self.timed += 1

    def learn_pace(self) -> bool:
        return True

    def gain(self, cuts, order):
        answer = self.gains.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def ways(*dearer: float) -> list[tuple[Division, float]]:
    return [(Division({}, [number], {}, {}), factor) for number, factor in enumerate(dearer)]


def better(*gains, dearer=(1.0, 1.004)):
    found = Pacing(Engine(*gains), ways(*dearer)).better()
    return found and (found[0].order[0], found[1], found[2])


def test_what_saves_more_in_a_short_generation_than_its_switch_takes_is_worth_it():
    assert better((0.60, 0.59, 0.1), (0.60, 0.60, 0.0)) == (0, 0.60, 0.59)
    assert better((0.60, 0.59, 0.3), (0.60, 0.60, 0.0)) is None, "30 steps save 0.3 s"
    assert better((6.00, 5.99, 0.0), (6.00, 6.00, 0.0)) is None, "less than a prediction says"
    assert better((0.02, 0.019, 0.0), (0.02, 0.02, 0.0)) is None, "less than mapping the pages anew takes"
    assert better((0.60, 0.61, 0.0), (0.60, 0.62, 0.0)) is None


def test_more_turns_must_pay_for_themselves():
    assert better((0.60, 0.590, 0.0), (0.60, 0.589, 0.0))[0] == 0
    assert better((0.60, 0.590, 0.0), (0.60, 0.580, 0.0))[0] == 1


def test_a_way_that_does_not_fit_or_was_not_measured_is_none():
    assert better(BudgetError("too small"), (0.60, 0.5, 0.0))[0] == 1
    assert better(None, (0.60, 0.5, 0.0))[0] == 1
    assert better(None, BudgetError("too small")) is None


def test_the_first_step_after_a_cut_is_not_the_one_that_is_measured():
    engine = Engine()
    pacing = Pacing(engine, ways(1.0))
    assert not pacing.is_known()
    pacing.after()
    assert engine.timed == 1 and not pacing.is_known()
    for _ in range(3):
        pacing.after()
        assert engine.timed == 1 and pacing.is_known()


class Uneven(nn.Module):
    """A block with one part that takes its time, and one of the same size that takes none."""

    def __init__(self) -> None:
        super().__init__()
        self.slow, self.fast = MlpBlock(width=32), MlpBlock(width=32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.slow(x)
        time.sleep(0.02)
        return self.fast(x)


@pytest.mark.usefixtures("cuts_where_it_pays")
def test_a_streamed_model_is_measured_and_planned_again_to_the_same_bits():
    torch.manual_seed(0)
    model = Towered([Uneven() for _ in range(10)]).eval().requires_grad_(False)
    # Large enough that loading what is resident tells the link's rate.
    model.extra = nn.Linear(DIM, (70 << 20) // 4 // DIM, bias=False)
    x = torch.randn(3, 8)
    with torch.inference_mode():
        expected = model(x)
        weights = sum(p.nbytes for p in model.parameters())
        device = host(bandwidth=300_000_000)
        with weightstream.attach(model, device=device, budget=weights - (6 << 20)) as attachment:
            pacing, units = [], []
            for _ in range(5):
                assert same_bits(model(x), expected)
                pacing.append(attachment._steps._pacing)
                units.append(attachment.report()["engine"]["stats"]["replans"])
            assert pacing[0] is not None and pacing[-1] is None, "measured once"
            assert units[-1] <= 2 and attachment.stats()["recoveries"] == 0
            assert attachment.report()["engine"]["page_bytes_peak"] <= weights - (6 << 20)
        assert same_bits(model(x), expected)


@pytest.mark.usefixtures("cuts_where_it_pays")
@pytest.mark.parametrize("way", [0, 1])
def test_planning_again_keeps_turns_and_units_together(monkeypatch, way):
    """Whatever is chosen, every turn is that of the right unit: poisoned ring bytes would show."""
    torch.manual_seed(0)
    model = Towered([MlpBlock(width=16) for _ in range(8)]).eval().requires_grad_(False)
    x = torch.randn(3, 8)
    replanned = []

    def chosen(self):
        division = self._ways[way][0]
        replanned.append(division)
        return division, 1.0, 0.5

    monkeypatch.setattr(Pacing, "better", chosen)
    monkeypatch.setattr(Pacing, "is_known", lambda self: self._steps > 1)
    with torch.inference_mode():
        expected = model(x)
        weights = sum(p.nbytes for p in model.parameters())
        with weightstream.attach(model, device=host(), budget=int(weights * 0.5)) as attachment:
            for _ in range(6):
                assert same_bits(model(x), expected)
            assert len(replanned) == 1
            assert any("planned again" in note for note in attachment.report()["notes"])
            # A change of the model drops what was measured with the evidence.
            forward = model.blocks[0].forward
            model.blocks[0].forward = lambda x: forward(x)
            for _ in range(5):
                assert same_bits(model(x), expected)
