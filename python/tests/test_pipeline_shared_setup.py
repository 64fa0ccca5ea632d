"""Setting up models that share weights: what is left out of quantizing, what is refused by name, and what is there once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_models import Model, set_up
from shared_models import WIDTH, Models, check, encoder_of_two, made, parameter

from weightstream import ModelError, offload


def test_a_model_that_is_quantized_leaves_out_what_it_shares() -> None:
    models, _, x = made(encoder_of_two)
    everything = {"transformer": models["prior"], "decoder": models["decoder"]}
    references = copy.deepcopy(everything)
    for model in references.values():
        model.bfloat16()
    offload.quantize(references["transformer"], quantize_exclude=["encoder"])
    with set_up(everything, quantizeTransformer=True, budgets=0.2):
        for _ in range(2):
            check(everything, references, x)


def test_types_that_disagree_about_shared_weights_are_refused() -> None:
    models, _, _ = made(parameter)
    models["transformer"]._convertWeightsFloatTo = None
    with pytest.raises(
        ModelError, match=r"text_encoder\.last\.weight.*transformer\.first\.weight.*_convertWeightsFloatTo"
    ):
        set_up(models)
    assert models["text_encoder"].first.weight.dtype == torch.float32
    models["text_encoder"].last._lock_dtype = torch.float32
    with set_up(models) as managed:
        assert managed.shared
        assert models["text_encoder"].last.weight is models["transformer"].first.weight
        assert models["text_encoder"].last.weight.dtype == torch.float32


def test_a_model_of_nothing_of_its_own_is_refused_by_name() -> None:
    models, _, _ = made(parameter)
    twin = copy.deepcopy(models["transformer"])
    for (_, mine), (_, theirs) in zip(twin.named_modules(), models["transformer"].named_modules()):
        mine._parameters.update(theirs._parameters)
    with pytest.raises(ModelError, match="all weights of transformer are those of .* text_encoder"):
        set_up({"transformer": models["transformer"], "text_encoder": twin})
    assert models["transformer"].first.weight.dtype == torch.float32


def test_the_same_model_under_two_ids_is_there_once() -> None:
    models, references, x = made(parameter)
    model = models["transformer"]
    with set_up({"transformer": model, "again": model}) as managed:
        assert list(managed.models) == ["transformer"]
        check({"transformer": model}, references, x)


def test_modules_that_two_models_were_loaded_with_are_there_once(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(8)
    references = {name: Model(WIDTH, 6).bfloat16().eval() for name in ("transformer", "transformer_2")}
    common = {
        key: value for key, value in references["transformer"].state_dict().items() if ".down." in key
    }  # of blocks
    references["transformer_2"].load_state_dict({**references["transformer_2"].state_dict(), **common})
    safetensors.save_file(common, str(tmp_path / "common.safetensors"))
    models: Models = {}
    given: dict[str, Any] = {}
    for name, reference in references.items():
        own = {key: value for key, value in reference.state_dict().items() if key not in common and key != "scale"}
        safetensors.save_file(own, str(tmp_path / f"{name}.safetensors"))
        with torch.device("meta"):
            model = Model(WIDTH, 6).eval()
        model.scale = torch.ones(WIDTH, dtype=torch.bfloat16)
        how = {"modules": given} if models else {"return_shared_modules": given}
        if not models:
            how["modules"] = str(tmp_path / "common.safetensors")
        path = str(tmp_path / f"{name}.safetensors")
        offload.load_model_data(model, path, default_dtype=torch.bfloat16, ignore_missing_keys=True, **how)
        models[name] = model
    x = torch.randn(2, WIDTH).bfloat16()
    with set_up(models, budgets=0.25, pinnedMemory=True) as managed:
        for _ in range(3):
            check(models, references, x)
        report = managed.report()["transformer+transformer_2"]
        assert report["model_bytes"] >= sum(value.nbytes for value in common.values())
        whole = sum(weight.nbytes for reference in references.values() for weight in reference.parameters())
        once = whole - sum(value.nbytes for value in common.values())
        assert once == sum(one["model_bytes"] for one in managed.report().values())
        weights = [model.blocks[2].down.weight for model in models.values()]
        assert weights[0] is weights[1]
    check(models, references, x)
