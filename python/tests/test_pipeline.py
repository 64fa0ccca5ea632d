"""Whole pipelines: what profiles set, who is on the device, and the same bits throughout."""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
import logging
import random
import weakref
from typing import Any

import pytest
import torch
from pipeline_models import Fuse, Pipeline, check, device, pipeline, set_up
from torch import nn

from weightstream import (
    BudgetError,
    LoadingCancelled,
    ModelError,
    NotAvailableError,
    StateError,
    offload,
    profile_type,
)

QUANTIZER = (
    importlib.import_module("weightstream.offload.quantizing")
    if importlib.util.find_spec("weightstream.offload.quantizing")
    else None
)


@pytest.mark.parametrize("number", range(1, 6))
def test_every_profile_computes_the_resident_bits(number: int) -> None:
    models, references, inputs = pipeline()
    pipe = Pipeline(**models, tokenizer=object(), scheduler=None)
    budgets = {"transformer": 0.5, "*": 0.25}
    with offload.profile(pipe, number, 0, quantizeTransformer=False, budgets=budgets, device=device()) as managed:
        for _ in range(2):
            check(models, references, inputs)
        for name, most in (("transformer", 0.5), ("text_encoder", 0.25)):
            report = managed.models[name].attachment.report()
            engine = report["engine"]
            taken = (engine["own_pages"] + engine["ring_pages"]) * engine["page_bytes"]
            assert taken <= most * 2**20
            assert engine["stats"]["copies"] > 0
        pinned = {name: managed.models[name].attachment.report()["host"]["registered_bytes"] > 0 for name in models}
        everything = number in (1, 2)
        assert pinned == {name: everything or (name == "transformer" and number in (3, 4)) for name in models}
    check(models, references, inputs)  # plain again, with the buffers that were written


def test_profiles_set_what_they_say_and_overrides_win(caplog: pytest.LogCaptureFixture) -> None:
    models, _, _ = pipeline("transformer", "vae")
    with caplog.at_level(logging.DEBUG, "weightstream.offload"):
        managed = offload.profile(
            models, profile_type.HighRAM_LowVRAM, 2, quantizeTransformer=False, device=device(), partialPinning=True
        )
    assert managed.parameters.pinnedMemory is True
    assert managed.parameters.partialPinning is True
    assert managed.parameters.budgets == {"transformer": 1200, "*": 3000}
    assert managed.parameters.preloadExperts is False
    assert any("HighRAM_LowVRAM sets" in record.message for record in caplog.records)
    managed.release()
    with pytest.raises(TypeError, match=r"profile_type\.LowRAM_LowVRAM \(4\)"):
        offload.profile(models, 6)


def test_what_is_not_there_yet_is_refused_by_name() -> None:
    models, _, _ = pipeline("transformer", "text_encoder")
    with pytest.raises(NotAvailableError, match="autoPreload"):
        set_up(models, autoPreload=True)
    with pytest.raises(NotAvailableError, match="autoPreload"):
        set_up(models, autoPreload={})
    if QUANTIZER is None:
        with pytest.raises(NotAvailableError, match="quantizeTransformer"):
            offload.all(models, device=device())
        with pytest.raises(NotAvailableError, match="extraModelsToQuantize"):
            set_up(models, extraModelsToQuantize=["text_encoder"])
    else:
        with pytest.raises(NotAvailableError, match="qint3"):
            set_up(models, quantizeTransformer=True, quantizationType="qint3")
    assert models["transformer"].first.weight.dtype == torch.float32


@pytest.mark.skipif(QUANTIZER is None, reason="nothing quantizes on the fly yet")
def test_quantized_models_compute_what_they_do_while_resident() -> None:
    models, _, inputs = pipeline("transformer", "text_encoder", "vae")
    references = {name: copy.deepcopy(model).bfloat16() for name, model in models.items()}
    for name in ("transformer", "text_encoder"):
        QUANTIZER.quantize(references[name])
    budgets = {"transformer": 0.25, "*": 0.2}
    with offload.profile(
        models, 4, 0, extraModelsToQuantize="text_encoder", budgets=budgets, device=device()
    ) as managed:
        for _ in range(2):
            check(models, references, inputs)
        assert managed.models["transformer"].attachment.stats()["copies"] > 0
        report = managed.models["transformer"].attachment.report()
        assert report["model_bytes"] < 0.6 * sum(
            2 * p.numel() for p in pipeline("transformer")[0]["transformer"].parameters()
        )
    with set_up(models, quantizeTransformer=True):  # they are quantized already
        check(models, references, inputs)


def test_models_that_accept_each_other_take_turns_without_loading_again() -> None:
    models, references, inputs = pipeline("transformer", "text_encoder")
    company = {"transformer": ["text_encoder"], "text_encoder": ["transformer"]}
    with set_up(models, coTenantsMap=company) as managed:
        for _ in range(4):
            check(models, references, inputs)
        assert managed.loaded() == ["transformer", "text_encoder"]
        for name in models:
            assert managed.models[name].attachment.stats()["arrivals"] == 1


def test_company_is_directional_and_a_star_stays_with_everyone() -> None:
    models, references, inputs = pipeline("transformer", "text_encoder", "vae")
    with set_up(models, coTenantsMap={"text_encoder": ["transformer"], "vae": "*"}) as managed:
        check(models, references, inputs, "vae", "transformer", "text_encoder")
        assert managed.loaded() == ["transformer", "text_encoder", "vae"]
        check(models, references, inputs, "transformer")
        assert managed.loaded() == ["transformer", "vae"]
        managed.unload_all(keep=["transformer"])
        assert managed.loaded() == ["transformer"]
        managed.unload_all()
        assert managed.loaded() == []
        assert managed.models["vae"].group.report()["page_bytes_in_use"] == 0
        check(models, references, inputs)
        with pytest.raises(ModelError, match="did you mean 'transformer'"):
            managed.unload_all(keep=["transfomer"])


def test_a_model_that_is_away_is_brought_by_whatever_needs_it() -> None:
    models, references, inputs = pipeline("transformer", "vae")
    vae, reference = models["vae"], references["vae"]
    vae._offload_hooks = ["decode"]
    x = inputs["vae"]
    with set_up(models, coTenantsMap={}) as managed, torch.no_grad():
        for call in (
            lambda model: model.encode(x),  # modules outside blocks, called by a method that is no hook
            lambda model: model.decode(x),  # a hooked method
            lambda model: model.blocks[1](x),  # a block alone
            lambda model: model.blocks[2].norm(x),  # a part of a block
            lambda model: model(x),
        ):
            check(models, references, inputs, "transformer")
            assert managed.loaded() == ["transformer"]
            assert torch.equal(call(vae), call(reference))
            assert managed.loaded() == ["vae"]
        check(models, references, inputs, "transformer")
        # What is away shows the host's bytes and nothing else.
        assert torch.equal(vae.last.weight.float(), reference.last.weight.float())
        assert torch.equal(vae.state_dict()["blocks.0.up.weight"], reference.blocks[0].up.weight)
        assert managed.loaded() == ["transformer"]
        with managed.models["vae"].attachment.resident(vae.blocks[0].up):
            assert torch.equal(vae.blocks[0].up.weight + 0, reference.blocks[0].up.weight + 0)
    assert "decode" not in vae.__dict__
    assert "forward" not in vae.first.__dict__


def test_a_budget_below_the_minimum_is_raised_with_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    models, references, inputs = pipeline("transformer", "vae")
    with caplog.at_level(logging.WARNING, "weightstream.offload"):
        managed = set_up(models, budgets={"transformer": 0.001, "*": 0})
    notices = [record.getMessage() for record in caplog.records]
    assert len(notices) == 1
    assert "transformer" in notices[0]
    assert "blocks." in notices[0]
    with managed:
        check(models, references, inputs)
        assert managed.models["vae"].attachment.stats()["copies"] == 0, "0 is without limit"


def test_working_memory_prevails_over_a_budget() -> None:
    models, references, inputs = pipeline("transformer")
    with set_up(models, budgets="90%", workingVRAM={"*": 15.5}) as managed:
        check(models, references, inputs)
        report = managed.models["transformer"].attachment.report()["engine"]
        assert (report["own_pages"] + report["ring_pages"]) * report["page_bytes"] <= 0.5 * 2**20
        assert report["stats"]["copies"] > 0


@pytest.mark.parametrize(
    ("parameters", "kind", "text"),
    [
        ({"budget": 3}, TypeError, "did you mean 'budgets'"),
        ({"pinnedmemory": True}, TypeError, "did you mean 'pinnedMemory'"),
        ({"budgets": {"transfromer": 3}}, ModelError, "did you mean 'transformer'"),
        ({"budgets": "3000"}, BudgetError, "80%"),
        ({"budgets": {"*": "120%"}}, BudgetError, r"budgets\['\*'\]"),
        ({"budgets": True}, BudgetError, "budgets"),
        ({"budgets": -1}, BudgetError, "from 0 up"),
        ({"pinnedMemory": ["unet"]}, ModelError, "pinnedMemory"),
        ({"pinnedMemory": 3}, TypeError, "pinnedMemory"),
        ({"loras": True}, TypeError, "loras"),
        ({"asyncTransfers": 1}, TypeError, "True or False"),
        ({"prefetchWindow": -1}, TypeError, "prefetchWindow"),
        ({"smartPinning": 0.5}, TypeError, "smartPinning"),
        ({"perc_reserved_mem_max": 40}, TypeError, "fraction"),
        ({"vram_safety_coefficient": 0}, TypeError, "0.85"),
        ({"coTenantsMap": {"vae": "transformer"}}, TypeError, "coTenantsMap"),
        ({"coTenantsMap": {"vae": ["transfomer"]}}, ModelError, "did you mean"),
        ({"convertWeightsFloatTo": torch.int8}, TypeError, "floating-point"),
        ({"loading_callback": print}, TypeError, "LoadingCallback"),
        ({"verboseLevel": 3}, TypeError, "verboseLevel"),
        ({"preloadExperts": None}, TypeError, "preloadExperts"),
        ({"compile": ["unet"]}, ModelError, "compile"),
    ],
)
def test_what_no_parameter_takes_is_refused(parameters: dict[str, Any], kind: type[Exception], text: str) -> None:
    models, _, _ = pipeline("transformer", "vae")
    before = models["transformer"].first.weight.dtype
    with pytest.raises(kind, match=text):
        set_up(models, **parameters)
    assert models["transformer"].first.weight.dtype == before


def test_what_is_no_pipeline_is_refused() -> None:
    for thing in (3, nn.Linear(2, 2), {}, {"a": 3}, {"a": nn.ReLU()}):
        with pytest.raises(ModelError):
            set_up(thing)


def test_hints_on_models() -> None:
    models, references, inputs = pipeline("transformer", "text_encoder", "vae")
    transformer, encoder, vae = models.values()
    transformer._convertWeightsFloatTo = None
    transformer.float()
    transformer.scale.data = transformer.scale.data.float()
    transformer._budget = 800_000
    encoder.last._lock_dtype = torch.float32
    encoder.first.bias._lock_dtype = torch.float32
    encoder._offload_separate_blocks = ("first", "last")
    vae._offload_hooks = ["encode"]
    vae._model_dtype = torch.bfloat16
    pipe = Pipeline(**models, other=nn.Linear(4, 4))
    pipe._mmgp_ignore_models = ["other"]
    with set_up(pipe, budgets=0.2) as managed:
        assert set(managed.models) == {"transformer", "text_encoder", "vae"}
        assert transformer.first.weight.dtype == torch.float32
        engine = managed.models["transformer"].attachment.report()["engine"]
        assert (engine["own_pages"] + engine["ring_pages"]) * engine["page_bytes"] <= 800_000
        assert {encoder.last.weight.dtype, encoder.first.bias.dtype} == {torch.float32}
        assert encoder.first.weight.dtype == torch.bfloat16
        units = [unit["name"] for unit in managed.models["text_encoder"].attachment.report()["engine"]["units"]]
        assert {"first", "last"} <= set(units)
        check(models, references, inputs, "vae")
        with torch.no_grad():
            wanted = references["vae"].encode(inputs["vae"])
            assert torch.equal(vae.encode(inputs["vae"].float()), wanted), "float32 arguments become the model's type"
    for hint, value, text in (
        ("_offload_hooks", ["missing"], "missing"),
        ("_offload_separate_blocks", ["blocks.0"], "shares modules"),
        ("_offload_separate_blocks", ["nowhere"], "nowhere"),
        ("_budget", "much", "_budget"),
        ("_model_dtype", torch.int8, "_model_dtype"),
    ):
        models, _, _ = pipeline("vae")
        setattr(models["vae"], hint, value)
        with pytest.raises(ModelError, match=text):
            set_up(models)


def test_a_wrapper_is_replaced_by_what_it_wraps() -> None:
    models, references, inputs = pipeline("transformer")

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    models["transformer"].config = {}
    wrapper = Wrapper(models["transformer"])
    with set_up({"transformer": wrapper}) as managed, torch.no_grad():
        assert managed.models["transformer"].model is models["transformer"]
        assert torch.equal(wrapper(inputs["transformer"]), references["transformer"](inputs["transformer"]))


def test_a_managed_pipelines_own_moves_are_refused_with_a_sentence() -> None:
    models, references, inputs = pipeline("transformer")
    pipe = Pipeline(**models)
    managed = set_up(pipe)
    for call in (lambda: pipe.to("cpu"), pipe.enable_model_cpu_offload):
        with pytest.raises(StateError, match="release"):
            call()
    with pytest.raises(StateError, match="attached"):
        models["transformer"].to("cpu")
    managed.release()
    managed.release()
    pipe.to("cpu")
    check(models, references, inputs)


@pytest.mark.parametrize("stop", range(9))
def test_cancelling_takes_back_all_that_was_set_up(stop: int) -> None:
    models, references, inputs = pipeline("transformer", "vae")
    phases: list[str] = []

    def progress(phase: str, completed: int, total: int, model_id: str) -> None:
        phases.append(f"{phase} {model_id}".strip())

    callback = offload.LoadingCallback(lambda: len(phases) > stop, progress)
    pipe = Pipeline(**models)
    with pytest.raises(LoadingCancelled):
        set_up(pipe, loading_callback=callback)
    assert "to" not in pipe.__dict__
    for model in models.values():
        model.bfloat16()
        assert not any(hasattr(module, "_weightstream") for module in model.modules())
    check(models, references, inputs)
    phases.clear()
    callback.abort_requested = None
    set_up(pipe, loading_callback=callback).release()
    assert phases[0] == "Preparing Models"
    assert [phase for phase in phases if phase.startswith("Preparing ") and "Models" not in phase] == [
        "Preparing transformer",
        "Preparing vae",
    ]
    assert phases[-1] == "Finalization vae"


def test_an_error_in_one_model_leaves_the_others_right() -> None:
    models, references, inputs = pipeline("transformer", "vae")
    with set_up(models, coTenantsMap={}) as managed:
        for error in (ValueError, KeyboardInterrupt, torch.OutOfMemoryError):
            block = models["transformer"].blocks[3].down
            handle = block.register_forward_pre_hook(lambda *_, error=error: (_ for _ in ()).throw(error("stop")))
            with pytest.raises(error), torch.no_grad():
                models["transformer"](inputs["transformer"])
            handle.remove()
            references["transformer"].scale.copy_(models["transformer"].scale)
            check(models, references, inputs)
        assert managed.loaded() == ["vae"]


def test_an_error_at_any_of_fifty_points_leaves_a_pipeline_whose_next_generation_is_right() -> None:
    models, references, inputs = pipeline("text_encoder", "transformer", "vae")
    draw = random.Random(5)
    order = ("text_encoder", "transformer", "transformer", "vae")
    with set_up(models, coTenantsMap={"vae": ["transformer"]}) as managed:
        check(models, references, inputs, *order)
        in_use = managed.models["vae"].group.report()["page_bytes_in_use"]
        for _ in range(50):
            Fuse.calls, Fuse.at = 0, draw.randint(1, 25)
            Fuse.error = draw.choice([ValueError, KeyboardInterrupt, SystemExit, torch.OutOfMemoryError])
            try:
                with pytest.raises(Fuse.error), torch.no_grad():
                    for name in order:
                        models[name](inputs[name])
            finally:
                Fuse.at = None
            for name, model in models.items():
                references[name].scale.copy_(model.scale)
            if draw.random() < 0.3:
                managed.unload_all(keep=draw.sample(list(models), 1))
            check(models, references, inputs, *order)
            assert managed.models["vae"].group.report()["page_bytes_in_use"] == in_use


def test_a_model_inside_anothers_step_is_refused_and_both_run_on() -> None:
    models, references, inputs = pipeline("transformer", "text_encoder")
    with set_up(models, coTenantsMap={}), torch.no_grad():
        inner = models["transformer"].blocks[2]
        seen: list[str] = []

        def run_other(*_: Any) -> None:
            with pytest.raises(StateError, match="text_encoder cannot run now: transformer") as caught:
                models["text_encoder"](inputs["text_encoder"])
            seen.append(str(caught.value))

        handle = inner.register_forward_pre_hook(run_other)
        check(models, references, inputs, "transformer")
        handle.remove()
        assert seen
        check(models, references, inputs)


def test_release_gives_everything_back_and_cycles_do_not_grow() -> None:
    models, references, inputs = pipeline("transformer", "vae")
    place = device()
    for _ in range(5):
        managed = set_up(models, device=place, pinnedMemory=True)
        check(models, references, inputs)
        group = weakref.ref(managed.models["vae"].group)
        report = managed.models["vae"].group
        managed.release()
        assert report.report()["page_bytes_in_use"] == 0
        del managed, report
        gc.collect()
        assert group() is None


def test_compiled_blocks_are_marked_and_unmarked() -> None:
    from weightstream.offload.compiling import compile_blocks
    from weightstream.towers import find_towers

    models, _, _ = pipeline("transformer")
    model = models["transformer"]
    model.blocks[1]._compile_me = False
    model.last._compile_me = True
    undo = compile_blocks(model, find_towers(model), "default")
    compiled = {name for name, module in model.named_modules() if module._compiled_call_impl is not None}
    assert compiled == {"last", *(f"blocks.{number}" for number in range(8) if number != 1)}
    undo()
    assert all(module._compiled_call_impl is None for module in model.modules())
