"""Whole pipelines: what profiles set, who is on the device, and the same bits throughout."""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
import logging
import random
import threading
import weakref
from typing import Any

import pytest
import torch
from pipeline_models import Fuse, Pipeline, check, device, pipeline, set_up
from torch import nn

from weightstream import (
    ModelError,
    NotAvailableError,
    StateError,
    offload,
    profile_type,
    runtime,
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
    settings = {"autoPreload": {}} if number in (1, 3) else {}  # what others measured is not known
    with offload.profile(
        pipe, number, 0, quantizeTransformer=False, budgets=budgets, device=device(), **settings
    ) as managed:
        for _ in range(2):
            check(models, references, inputs)
        for name, most in (("transformer", 0.5), ("text_encoder", 0.25)):
            report = managed.models[name].attachment.report()
            engine = report["engine"]
            taken = (engine["own_pages"] + engine["ring_pages"]) * engine["page_bytes"]
            fills = number in (1, 3)  # what the workload leaves free, since its second step
            assert (taken > most * 2**20) == fills
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
    with pytest.raises(TypeError, match="autoPreload"):
        set_up(models, autoPreload="yes")
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


@pytest.mark.parametrize("budgets", [0, 0.1, 0.3])
def test_a_part_of_any_block_brings_its_model_whatever_is_resident_of_it(budgets: float) -> None:
    models, references, inputs = pipeline("transformer", "vae", "text_encoder")
    for one in (models, references):
        torch.manual_seed(9)
        layer = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True).eval().bfloat16()
        one["vae"].fused = layer  # reads its children's weights by itself
    x = inputs["vae"]
    with set_up(models, budgets=budgets, coTenantsMap={}) as managed, torch.no_grad():
        for ran in range(2):
            for path in ("blocks.1.up", "blocks.2.norm", "blocks.0", "last", "fused", "fused.self_attn.out_proj"):
                check(models, references, inputs, "transformer")
                got, wanted = models["vae"].get_submodule(path), references["vae"].get_submodule(path)
                assert torch.equal(got(x[None])[0], wanted(x[None])[0]), (path, ran)
                assert managed.loaded() == ["vae"]
            managed.models["vae"].attachment.set_budget("1%" if ran else "200KiB")
            check(models, references, inputs)


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


def test_a_second_thread_is_refused_while_the_first_brings_the_model_which_goes_on() -> None:
    models, references, inputs = pipeline("transformer", "vae")
    brings, tried = threading.Event(), threading.Event()
    refused: list[BaseException] = []

    def run_too() -> None:
        brings.wait(60)
        try:
            check(models, references, inputs, "transformer")
        except BaseException as error:
            refused.append(error)
        tried.set()

    def wait() -> None:
        brings.set()
        assert tried.wait(60)

    with set_up(models, coTenantsMap={}):
        check(models, references, inputs, "vae")
        thread = threading.Thread(target=run_too)
        thread.start()
        with runtime.execution_scope(wait):
            check(models, references, inputs, "transformer")
        thread.join()
        assert [type(error) for error in refused] == [StateError], refused
        assert "second thread" in str(refused[0])
        check(models, references, inputs)


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
