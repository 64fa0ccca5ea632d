"""Setting up pipelines: what is asked for, what is refused, hints on models, and cancelling."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from pipeline_models import Pipeline, check, device, pipeline, set_up
from torch import nn

from weightstream import BudgetError, DeviceError, LoadingCancelled, ModelError, StateError, offload


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


def test_a_device_that_has_not_even_the_minimum_is_refused_when_it_is_set_up() -> None:
    models, references, inputs = pipeline("transformer", "vae")
    small = device("160KiB")
    with pytest.raises(
        BudgetError, match=r"transformer needs 0\.\d MB .* largest block blocks\.\d; of its 0\.2 MB .* 0\.1"
    ):
        set_up(models, device=small)
    assert not any("_weightstream" in module.__dict__ for model in models.values() for module in model.modules())
    with set_up({"vae": models["vae"]}, device=small):
        check(models, references, inputs, "vae")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without that device")
def test_a_device_that_is_not_there_is_refused_before_anything_is_quantized() -> None:
    models, _, _ = pipeline("transformer")
    with pytest.raises(DeviceError):
        offload.profile(models, 4, 0, device="cuda")
    assert type(models["transformer"].blocks[0].up) is nn.Linear
    assert models["transformer"].first.weight.dtype == torch.float32


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


def test_hints_of_a_wrong_type_are_refused() -> None:
    class Broken(Pipeline):
        @property
        def components(self) -> dict[str, nn.Module]:
            raise OSError("the pipeline was initialized incorrectly")

    models, _, _ = pipeline("vae")
    with pytest.raises(ModelError, match="components of this Broken cannot be read: the pipeline was"):
        set_up(Broken.__new__(Broken))
    for hint, value in (("_offload_hooks", 5), ("_offload_hooks", [3]), ("_offload_separate_blocks", {"first": 1})):
        setattr(models["vae"], hint, value)
        with pytest.raises(ModelError, match=f"{hint} of vae is .*: it is a list of names"):
            set_up(models)
        delattr(models["vae"], hint)
    for value in (5, "vae", [3]):
        pipe = Pipeline(**models)
        pipe._mmgp_ignore_models = value
        with pytest.raises(ModelError, match="_mmgp_ignore_models is .*: it is a list of model ids"):
            set_up(pipe)


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


def test_compiled_blocks_are_marked_and_unmarked() -> None:
    from weightstream.offload.compiling import compile_blocks
    from weightstream.towers import find_towers

    models, _, _ = pipeline("transformer")
    model = models["transformer"]
    model.blocks[1]._compile_me = False
    model.last._compile_me = True
    undo: list[Any] = []
    compile_blocks(model, find_towers(model), "default", undo)
    compiled = {name for name, module in model.named_modules() if module._compiled_call_impl is not None}
    assert compiled == {"last", *(f"blocks.{number}" for number in range(8) if number != 1)}
    undo.pop()()
    assert all(module._compiled_call_impl is None for module in model.modules())
