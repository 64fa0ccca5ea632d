"""Wrong values of every parameter of `profile` and `all`: refused by name before anything changes, and what is right runs."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from pipeline_models import Pipeline, check, device, pipeline, set_up

from weightstream import StateError, WeightstreamError, offload

NAN, INF = float("nan"), float("inf")
ANYTHING: list[Any] = [
    *(None, 0, 1, -1, 2.5, NAN, INF, True, False, 10**30, 10**400, -0.0, 1e300),
    *(
        "",
        "transformer",
        "transfromer",
        "0%",
        "101%",
        "80 %",
        "100%",
        "-5%",
        "80",
        "1e2%",
        "١٢%",
        "*",
        "qint8",
        "float16",
    ),
    *(["transformer"], ["transfromer"], ("vae",), {"vae"}, frozenset({"vae"}), [None], [["vae"]], [], (), set(), {}),
    *(
        {"transformer": 1},
        {"vae": None},
        {"unet": 3},
        {3: 4},
        {"*": -1},
        {"*": "0%"},
        {"vae": "*"},
        {"vae": ["unet"]},
        {"vae": [3]},
    ),
    *(
        b"vae",
        object(),
        print,
        torch.float16,
        torch.int8,
        torch.tensor(3),
        numpy.int64(1),
        numpy.float32(0.5),
        numpy.bool_(True),
    ),
]
SIZES = [
    0,
    1,
    2.5,
    -0.0,
    1e300,
    10**30,
    10**400,
    "80 %",
    "100%",
    numpy.int64(1),
    numpy.float32(0.5),
    {},
    {"transformer": 1},
]
LISTS = [None, False, [], (), set(), "transformer", ["transformer"], ("vae",), {"vae"}]
FLAGS = [True, False]
COUNTS = [None, 0, 1, 10**30, 10**400, numpy.int64(1)]
TAKEN: dict[str, list[Any]] = {
    "pinnedMemory": [*LISTS, True],
    "partialPinning": FLAGS,
    "pinnedPEFTLora": FLAGS,
    "perc_reserved_mem_max": [0, 1, -0.0, numpy.int64(1), numpy.float32(0.5)],
    "smartPinning": COUNTS,
    "quantizeTransformer": FLAGS,
    "extraModelsToQuantize": LISTS,
    "quantizationType": [None, "qint8"],
    "convertWeightsFloatTo": [None, torch.float16],
    "budgets": [None, *SIZES],
    "workingVRAM": [None, *SIZES],
    "vram_safety_coefficient": [1, numpy.int64(1), numpy.float32(0.5)],
    "asyncTransfers": FLAGS,
    "prefetchWindow": COUNTS,
    "autoPreload": [*FLAGS, *(value for value in ANYTHING if isinstance(value, dict))],
    "loras": LISTS,
    "coTenantsMap": [None, {}, {"vae": "*"}],
    "compile": [*LISTS, True],
    "compile_mode": [None],
    "loading_callback": [None],
    "preloadExperts": FLAGS,
    "verboseLevel": [-1, 0, 1, numpy.int64(1)],
    "device": [],
    "profile_no": [1, numpy.int64(1)],
}
"""What of that each parameter takes. 1 and True are equal: types count, too."""


def is_taken(name: str, value: Any) -> bool:
    return any(type(value) is type(one) and value == one for one in TAKEN[name])


def test_every_parameter_is_looked_at() -> None:
    from dataclasses import fields

    from weightstream.offload.parameters import Parameters

    assert {field.name for field in fields(Parameters)} | {"device", "profile_no"} == set(TAKEN)


def state(models: dict[str, Any]) -> list[Any]:
    """All that setting up may change: objects, types, bytes' places, forwards, marks."""
    parts = [part for model in models.values() for part in model.modules()]
    tensors = [tensor for model in models.values() for tensor in (*model.parameters(), *model.buffers())]
    return [
        [(type(part), sorted(part.__dict__), part._compiled_call_impl) for part in parts],
        [(id(tensor), type(tensor), tensor.dtype, tensor.device, tensor.data_ptr()) for tensor in tensors],
    ]


@pytest.mark.parametrize("name", TAKEN)
def test_anything_is_taken_or_refused_by_name_before_anything_changes(name: str) -> None:
    emulated = device()
    untouched = pipeline("transformer", "text_encoder", "vae")[0]
    pipe = Pipeline(**untouched)
    before = state(untouched)
    for value in ANYTHING:
        settings = {"quantizeTransformer": False, "verboseLevel": 0, "device": emulated, name: value}
        if not is_taken(name, value):
            with pytest.raises((TypeError, WeightstreamError)) as caught:
                offload.profile(pipe, settings.pop("profile_no", 5), **settings)
            assert name in str(caught.value) or (name == "device" and repr(value) in str(caught.value)), value
            assert state(untouched) == before and list(vars(pipe)) == ["components"], value
            continue
        # It may convert and quantize: other models.
        models, references, inputs = pipeline("transformer", "text_encoder", "vae")
        managed = offload.profile(Pipeline(**models), settings.pop("profile_no", 5), **settings)
        if name not in ("convertWeightsFloatTo", "quantizeTransformer", "extraModelsToQuantize", "compile"):
            check(models, references, inputs)
        managed.release()
        assert not any("_weightstream" in part.__dict__ for model in models.values() for part in model.modules()), value


@pytest.mark.parametrize(
    "wrong, right",
    [
        ({"budgest": 3}, "budgets"),
        ({"autopreload": True}, "autoPreload"),
        ({"profil_no": 4}, "profile_no"),
        ({"devise": "host"}, "device"),
        ({"budgets": {"text_encoder2": 3}}, "text_encoder"),
        ({"workingVRAM": {"Vae": 3}}, "vae"),
        ({"coTenantsMap": {"vea": []}}, "vae"),
        ({"loras": ["transformers"]}, "transformer"),
        ({"compile_mode": "max-autotun"}, "max-autotune"),
    ],
)
def test_the_nearest_right_name_is_told(wrong: dict[str, Any], right: str) -> None:
    models, _, _ = pipeline("transformer", "text_encoder", "vae")
    before = state(models)
    with pytest.raises((TypeError, WeightstreamError), match=f"did you mean '{right}'"):
        set_up(models, **wrong)
    assert state(models) == before


def test_a_share_in_the_environment_that_is_none_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    models, references, inputs = pipeline("transformer")
    before = state(models)
    monkeypatch.setenv("perc_reserved_mem_max", "40%")
    with pytest.raises(WeightstreamError, match="perc_reserved_mem_max.*40%"):
        set_up(models)
    assert state(models) == before
    monkeypatch.setenv("perc_reserved_mem_max", "0.4")
    with set_up(models):
        check(models, references, inputs)


def test_a_percentage_says_its_bounds() -> None:
    for text in ("0%", "101%", "80"):
        with pytest.raises(WeightstreamError, match="above 0% and up to 100%"):
            set_up(pipeline("vae")[0], budgets=text)
    with pytest.raises(WeightstreamError, match="0 for no limit"):
        set_up(pipeline("vae")[0], budgets=INF)


def test_a_second_set_up_is_refused_and_leaves_the_first() -> None:
    models, references, inputs = pipeline("transformer", "vae")
    with set_up(models):
        with pytest.raises(StateError, match="already attached"):
            set_up(Pipeline(**models))
        check(models, references, inputs)


def test_wrong_arguments_of_the_offload_object() -> None:
    models, references, inputs = pipeline("transformer", "vae")
    managed = set_up(models, autoPreload=True)
    for wrong in (-1, True, "8MiB", 2.5, NAN, []):
        with pytest.raises(TypeError, match="bytes is .*; give a number of bytes"):
            managed.release_preload(wrong)  # type: ignore[arg-type]
    assert managed.release_preload(10**30) >= 0
    for keep in (5, b"vae"):
        with pytest.raises(TypeError, match="keep is .*; give a model id"):
            managed.unload_all(keep)  # type: ignore[arg-type]
    for keep in ("vea", ["vea"], [3]):
        with pytest.raises(WeightstreamError, match="no model here.*there are transformer, vae"):
            managed.unload_all(keep)  # type: ignore[arg-type]
    check(models, references, inputs, "vae")
    for keep, here in (("vae", ["vae"]), (iter(["vae"]), ["vae"]), (None, [])):
        managed.unload_all(keep)
        assert managed.loaded() == here
    check(models, references, inputs)
    managed.release()
    with pytest.raises(WeightstreamError, match="there are none"):
        managed.unload_all("vae")


def test_a_callback_that_cannot_be_called_is_refused_where_it_is_made() -> None:
    for wrong in ({"abort_requested": True}, {"progress": "x"}):
        with pytest.raises(TypeError, match="cannot be called"):
            offload.LoadingCallback(**wrong)
    with pytest.raises(TypeError, match="model_ids is a int"), offload.loading_context(None, 5):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize(
    "place", ["compile_blocks", "_place_buffers", "declare", "plan_models", "set_preloading", "_refuse_moves"]
)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_behind_any_stage_of_setting_up_takes_it_back(
    place: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightstream.offload import pipeline as stages

    models, references, inputs = pipeline("transformer", "vae")
    pipe = Pipeline(**models)
    stage = getattr(stages, place)

    def fails(*arguments: Any) -> None:
        stage(*arguments)
        raise error("behind it")

    with monkeypatch.context() as patched, pytest.raises(error, match="behind it"):
        patched.setattr(stages, place, fails)
        set_up(pipe, compile="vae", autoPreload=True, loras="transformer", pinnedMemory=True)
    parts = [part for model in models.values() for part in model.modules()]
    assert not any("_weightstream" in part.__dict__ or "forward" in part.__dict__ for part in parts)
    assert all(part._compiled_call_impl is None for part in parts) and list(vars(pipe)) == ["components"]
    with set_up(pipe):
        check(models, references, inputs)
