"""Arguments that make no sense are refused by a typed error that says what to write instead."""

from __future__ import annotations

import warnings

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


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"order": "sorted"}, "copy order 'sorted'"), ({"granularity": 1000}, "power of two"), ({"granularity": 0}, "two"),
        ({"bytes": "-1"}, "size"), ({"bandwidth": 0}, "bandwidth"), ({"seed": -1}, "cannot be a device"),
        ({"bytes": "4KiB", "granularity": 8192}, "granularity"), ({"bandwidth": "fast"}, "cannot be a device"),
        ({"granularity": -4096}, "cannot be a device"), ({"seed": 0.5}, "cannot be a device"),
    ],
)  # fmt: skip
def test_a_host_device_that_cannot_be_is_refused_when_it_is_made(settings: dict, match: str) -> None:
    with pytest.raises(DeviceError, match=match):
        weightstream.HostDevice(**settings)


def test_the_fallback_of_auto_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    weightstream.devices._warn_of_fallback.cache_clear()
    for times in (1, 0):
        model = mlp()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            attachment = weightstream.attach(model, budget="500KiB")
        attachment.detach()
        assert [str(warning.message).split(":")[0] for warning in seen] == ["PyTorch sees no CUDA device"] * times
        assert all(warning.filename == __file__ for warning in seen)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weightstream.attach(mlp(), device="host", budget="500KiB").detach()


def test_of_a_pipeline_the_modules_are_named_largest_first() -> None:
    class Pipeline:
        def __init__(self, parts: dict) -> None:
            self.components = parts

    class Broken:
        @property
        def components(self) -> dict:
            raise RuntimeError("not yet")

    pipe = Pipeline({"scheduler": 3, "vae": nn.Linear(8, 8), "transformer": mlp(), "safety_checker": None})
    with pytest.raises(ModelError, match=r"not a Pipeline; attach its modules one by one: \.transformer, \.vae$"):
        weightstream.attach(pipe, device=host())
    for other in (Broken(), 3, "model", Pipeline({}), None):
        with pytest.raises(ModelError, match=r"not a \w+$"):
            weightstream.attach(other, device=host())
