"""What the operators of a graph's turns are declared to change: each promise that is left out gives other bits, or an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attach_models import attached, host, inputs, mlp, run, same_bits
from torch import nn
from whole_models import MODELS, ONE_GRAPH, Revealing, compiled_resident, seeded

import weightstream

pytestmark = ONE_GRAPH

ENTER = "(Tensor turn, Tensor(a!) order, Tensor(b!)[] weights) -> ()"
LEAVE = "(Tensor turn, Tensor(a!) order, Tensor(b!)[] weights, Tensor[] crossing) -> ()"


def promising(monkeypatch: pytest.MonkeyPatch, name: str, enter: str, leave: str) -> torch.library.Library:
    """Has graphs use operators with these schemas."""
    from weightstream import graph_operators

    library, entering, leaving = graph_operators.define(f"weightstream_{name}", enter, leave)
    monkeypatch.setattr(graph_operators, "enter", entering)
    monkeypatch.setattr(graph_operators, "leave", leaving)
    return library


def same(make: Callable[[], nn.Module], backend: str) -> bool:
    """Whether a third step in one graph has the resident graph's bits."""
    x = inputs()
    expected = compiled_resident(make, backend, x)
    torch._dynamo.reset()
    model = make()
    with attached(model, 0.5, device=host("lazy")) as attachment:
        attachment.compile(backend=backend)
        run(model, x)
        run(model, x)
        return same_bits(run(model, x), expected)


def test_with_all_promises_the_bits_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    library = promising(monkeypatch, "all", ENTER, LEAVE)
    assert same(MODELS["late"], "inductor")
    library._destroy()


def test_reads_move_before_an_enter_that_changes_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    library = promising(monkeypatch, "early", ENTER.replace("(b!)", ""), LEAVE)
    assert not same(MODELS["late"], "inductor")
    library._destroy()


def nothing_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has turns end without what the block read and made."""
    from weightstream import graph_crossing

    monkeypatch.setattr(graph_crossing, "_cross", lambda *_: False)


def test_reads_move_behind_a_leave_that_changes_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    library = promising(monkeypatch, "late", ENTER, LEAVE.replace("(b!)", ""))
    nothing_crosses(monkeypatch)
    assert not same(seeded(Revealing), "inductor")
    library._destroy()


def test_reads_that_move_behind_a_leave_are_found_by_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_crosses(monkeypatch)
    with pytest.raises(weightstream.ForwardError, match="copies weights of blocks.0"):
        same(mlp, "inductor")


def test_turns_run_into_each_other_without_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    library = promising(monkeypatch, "mixed", ENTER.replace("(a!)", ""), LEAVE.replace("(a!)", ""))
    with pytest.raises((weightstream.StateError, weightstream.ForwardError), match="share ring memory|keep the order"):
        same(MODELS["late"], "inductor")
    library._destroy()


def test_operators_that_change_nothing_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    schemas = (schema.replace("(a!)", "").replace("(b!)", "") for schema in (ENTER, LEAVE))
    library = promising(monkeypatch, "deleted", *schemas)
    assert not same(mlp, "aot_eager")
    library._destroy()


def test_code_is_shared_by_models_since_numbers_are_in_tensors() -> None:
    counters = torch._dynamo.utils.counters
    for _ in range(2):
        counters.clear()
        assert same(lambda: mlp(seed=3), "inductor")
        torch._dynamo.reset()
    assert counters["aot_autograd"]["autograd_cache_hit"] >= 2
