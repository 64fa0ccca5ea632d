"""Arguments that make no sense are refused by a typed error that says what to write instead."""

from __future__ import annotations

import pytest
import torch
from attach_models import attached, host, inputs, mlp, run, same_bits
from torch import nn

import weightstream
from weightstream import BudgetError, DeviceError, ModelError


@pytest.mark.parametrize("what", [None, "blocks.0", 3, [], nn.Linear(2, 2), nn.Linear])
def test_resident_takes_modules_of_the_model(what: object) -> None:
    model = mlp()
    with attached(model) as attachment:
        for wrong in (what, model.head.weight):
            with pytest.raises(ModelError, match="module of the attached|not part of the attached"):
                with attachment.resident(wrong):
                    pass
        assert run(model, inputs()).isfinite().all()


@pytest.mark.parametrize("size", [0, -1, "x", "", "0x10", "50%", True, 1.5, 10**30, 1 << 64, "-5MiB"])
def test_sizes_of_the_host_device_that_are_none(size: object) -> None:
    with pytest.raises(DeviceError, match="size") as raised:
        weightstream.attach(mlp(), device=host(bytes=size), budget="500KiB")
    assert f"bytes={size!r}" in str(raised.value)


TOWERS = {
    "no name": ("", "the model itself"),
    "the model": (..., "the model itself"),
    "the model in a list": ([...], "the model itself"),
    "an empty list in a list": ([[]], "empty list of blocks"),
    "no such name": ("layers", "not a module of the model"),
}


@pytest.mark.parametrize("way", TOWERS)
def test_towers_that_are_none(way: str) -> None:
    model = mlp()
    towers, match = TOWERS[way]
    towers = model if towers is ... else [model] if towers == [...] else towers
    with pytest.raises(ModelError, match=match) as raised:
        weightstream.attach(model, device=host(), budget="500KiB", towers=towers)
    assert "'blocks'" in str(raised.value) or "itself" not in match


def test_a_model_that_is_a_list_may_be_named() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    x = torch.ones(2, 64)
    expected = run(model, x)
    for towers in ("", model):
        with attached(model, 0.6, towers=towers):
            assert same_bits(run(model, x), expected)


@pytest.mark.parametrize("towers", [None, []])
def test_a_budget_too_small_for_a_model_without_towers(towers: object) -> None:
    with pytest.raises(BudgetError, match="no tower was found.*towers=.*at least"):
        weightstream.attach(nn.Linear(300, 300), device=host(), budget="100KiB", towers=towers)
    with pytest.raises(BudgetError, match="0x"):
        weightstream.attach(nn.Linear(300, 300), device=host(), budget="0x10")
