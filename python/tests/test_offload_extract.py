"""extract_models: the models in an object, by name."""

from __future__ import annotations

from types import SimpleNamespace as Holder

import pytest
from torch import nn

from weightstream import ModelError, offload


def test_attributes_components_and_dictionaries() -> None:
    models = [nn.Linear(1, 1) for _ in range(5)]
    pipe = Holder(components={"vae": models[0], "tokenizer": 3, "scheduler": None})
    app = Holder(transformer=models[1], number=3, pipe=pipe, more={"text_encoder": models[2]}, again=models[1])
    expected = {"vae": models[0], "transformer": models[1], "text_encoder": models[2]}
    assert offload.extract_models(app) == expected
    for found in (offload.extract_models(app, "x/"), offload.extract_models("x/", app)):
        assert found == {"x/" + name: model for name, model in expected.items()}
    assert set(offload.extract_models(app, "x")) == {"xvae", "xtransformer", "xtext_encoder"}
    assert offload.extract_models(pipe, "") == {"vae": models[0]}
    assert offload.extract_models({"a": models[3], "b": 1}, None) == {"a": models[3]}
    assert offload.extract_models(Holder(pipeline=Holder(components={"unet": models[4]}))) == {"unet": models[4]}


def test_a_module_is_searched_for_its_children() -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    assert offload.extract_models(module, "m.") == {"m.0": module[0], "m.1": module[1]}


def test_what_cannot_be_searched() -> None:
    with pytest.raises(ModelError, match="object"):
        offload.extract_models("prefix")
    with pytest.raises(ModelError, match="text as prefix"):
        offload.extract_models(Holder(), 3)
    assert offload.extract_models(3) == {}
