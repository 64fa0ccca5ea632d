"""Budgets as people write them, and how reserved RAM is shared between models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_models import Pipeline, check, pipeline, set_up

from weightstream import BudgetError, ModelError, StateError
from weightstream.offload.amounts import MEGABYTE, amount, budget_of

GIGABYTE = 1 << 30


@pytest.mark.parametrize(
    ("budgets", "working", "own", "wanted"),
    [
        (0, None, None, int(24 * GIGABYTE * 0.85)),
        (3000, None, None, 3000 * MEGABYTE),
        ("50%", None, None, 12 * GIGABYTE),
        ({"a": 100, "*": 3000}, None, None, 100 * MEGABYTE),
        ({"b": 100, "*": "25%"}, None, None, 6 * GIGABYTE),
        ({"b": 100}, None, None, int(24 * GIGABYTE * 0.85)),
        (1e9, None, None, int(24 * GIGABYTE * 0.85)),
        (20_000, {"*": 20 * 1024}, None, 4 * GIGABYTE),
        (1000, 20 * 1024, None, 1000 * MEGABYTE),
        (1000, "75%", None, 1000 * MEGABYTE),
        (0, "75%", None, 6 * GIGABYTE),
        (0, "100%", None, 1),
        (1000, None, 5, 5),
        (1000, None, 0, int(24 * GIGABYTE * 0.85)),
        (0.5, None, None, MEGABYTE // 2),
    ],
)
def test_budgets_and_working_memory(budgets: Any, working: Any, own: int | None, wanted: int) -> None:
    assert budget_of("a", budgets, working, 24 * GIGABYTE, 0.85, own) == wanted


def test_a_percentage_is_of_the_device_and_what_is_none_is_refused() -> None:
    assert amount("x", "80%", 1000) == 800
    assert amount("x", " 12.5 % ", 1000) == 125
    for bad in ("80", "0%", "101%", "-5%", "", "x%", None, True, -1, float("nan"), float("inf"), [1]):
        with pytest.raises(BudgetError, match="x is"):
            amount("x", bad, 1000)


def locked(managed: Any, name: str) -> int:
    return managed.models[name].attachment.report()["host"]["registered_bytes"]


def streamed(managed: Any, name: str) -> tuple[int, int]:
    host = managed.models[name].attachment.report()["host"]
    return host["registered_bytes"], host["pageable_bytes"]


def test_what_is_pinned_is_what_was_asked_for() -> None:
    models, references, inputs = pipeline("transformer", "text_encoder", "vae")
    with set_up(models, pinnedMemory=["transformer"]) as managed:
        whole = streamed(managed, "transformer")
        assert whole[0] > 0
        assert whole[1] == 0
        assert streamed(managed, "vae")[0] == 0
        check(models, references, inputs)
    with set_up(models, pinnedMemory="transformer", partialPinning=True, smartPinning=3) as managed:
        towers = streamed(managed, "transformer")
        assert 0 < towers[0] < whole[0] + 8192
        assert towers[1] > 0, "what is outside towers is not"
        assert 0 < streamed(managed, "text_encoder")[0] < streamed(managed, "text_encoder")[1]
        check(models, references, inputs)
    with set_up(models) as managed:
        assert [locked(managed, name) for name in models] == [0, 0, 0]
        check(models, references, inputs)


def test_a_limit_that_nothing_fits_in_pins_nothing_and_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    models, references, inputs = pipeline("transformer", "vae")
    with set_up(models, pinnedMemory=True, perc_reserved_mem_max=1e-9) as managed:
        assert [locked(managed, name) for name in models] == [0, 0]
        check(models, references, inputs)
    monkeypatch.setenv("perc_reserved_mem_max", "nonsense")
    with pytest.raises(Exception, match="nonsense"):
        set_up(models, pinnedMemory=True)
    check(models, references, inputs)


def test_adapters_are_pinned_only_where_that_is_asked_for() -> None:
    from torch import nn

    def adapted() -> Any:
        models, references, inputs = pipeline("vae")
        for block in (*models["vae"].blocks, *references["vae"].blocks):
            block.register_module("lora_A", nn.ModuleDict({"x": nn.Linear(64, 64)}).bfloat16())
        return models, references, inputs

    sizes = []
    for adapters in (False, True):
        models, references, inputs = adapted()
        with set_up(models, pinnedMemory=True, pinnedPEFTLora=adapters) as managed:
            sizes.append(streamed(managed, "vae"))
            check(models, references, inputs)
    assert sizes[0][1] > 0
    assert sizes[1][1] == 0
    assert sizes[0][0] < sizes[1][0]


def test_what_cannot_be_attached_is_refused_before_anything_changes() -> None:
    models, _, _ = pipeline("transformer", "vae")
    models["vae"].last.weight = torch.nn.Parameter(torch.empty(64, 64, device="meta"))
    with pytest.raises(ModelError, match=r"vae: last\.weight is on the meta device"):
        set_up(models)
    assert models["transformer"].first.weight.dtype == torch.float32
    models, references, inputs = pipeline("transformer")
    with set_up(models), pytest.raises(StateError, match=r"transformer is already attached.*release\(\).*_mmgp_ignore"):
        set_up(models)
    check(models, references, inputs)


def test_a_component_that_another_pipeline_manages_is_left_to_it() -> None:
    models, references, inputs = pipeline("transformer", "vae")
    others, theirs, noise = pipeline("transformer", seed=1)
    pipe = Pipeline(transformer=others["transformer"], vae=models["vae"])
    with set_up(models) as managed:
        with pytest.raises(StateError, match="vae is already attached"):
            set_up(pipe)
        pipe._mmgp_ignore_models = ["vae"]
        with set_up(pipe) as second:
            assert list(second.models) == ["transformer"]
            for _ in range(2):
                check(models, references, inputs)
                check(others, theirs, noise)
            managed.release()
            check(others, theirs, noise)
        check(models, references, inputs)


def test_pipelines_set_up_apart_run_on_two_threads() -> None:
    import threading

    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            models, references, inputs = pipeline("transformer", "vae", seed=seed)
            with set_up(models) as managed:
                for _ in range(3):
                    check(models, references, inputs)
                managed.unload_all()
                check(models, references, inputs)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
