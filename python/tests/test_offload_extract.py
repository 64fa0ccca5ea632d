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
    assert offload.extract_models(Holder()) == {} and offload.extract_models({"a": None}) == {}


def test_lists_are_named_by_their_places_and_pairs_by_their_names() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    both = {"0": first, "1": second}
    model = nn.Sequential(first, second)
    for given in (
        [first, second],
        (first, second),
        iter([first, second]),
        (one for one in both.values()),
        model.children(),
    ):
        assert offload.extract_models(given) == both
    assert offload.extract_models("x.", [None, first, "tokenizer"]) == {"x.1": first}
    assert offload.extract_models(model.named_children()) == both
    assert offload.extract_models([("unet", first), ("vae", second), ("other", None)]) == {"unet": first, "vae": second}


class Slots:
    """An object without a dictionary of attributes."""

    __slots__ = ("empty", "vae")


class Shared:
    """A model of the class, and properties that must not run."""

    vae = nn.Linear(2, 2)

    @property
    def loads(self) -> nn.Module:
        raise AssertionError("a property was read")

    @property
    def components(self) -> dict[str, nn.Module]:
        raise ValueError("the pipeline was initialized incorrectly")


def test_where_attributes_may_be() -> None:
    slots = Slots()
    assert offload.extract_models(slots) == {}
    slots.vae = nn.Linear(2, 2)
    assert offload.extract_models(slots) == {"vae": slots.vae}
    shared = Shared()
    shared.unet = nn.Linear(2, 2)
    assert offload.extract_models(shared) == {"vae": Shared.vae, "unet": shared.unet}
    # A pipeline that cannot say its components has them as attributes.
    assert offload.extract_models(Holder(pipe=shared)) == {"vae": Shared.vae, "unet": shared.unet}


@pytest.mark.parametrize(
    "given, words",
    [
        (3, "a int holds no models by name"),
        ({nn.Linear(2, 2)}, "a set holds no models by name"),
        ([], "no model in this list"),
        ((None, "tokenizer"), "no model in this tuple"),
        ((one for one in ()), "no model in this generator"),
        ([{"unet": nn.Linear(2, 2)}], "element 0 is a dict"),
        ([Holder(components={"unet": nn.Linear(2, 2)})], "element 0 is a SimpleNamespace"),
        (nn.Linear(2, 2), "a Linear has no modules inside it"),
        ({3: nn.Linear(2, 2)}, "names are texts, and 3 is a int"),
        ({"encoders": [nn.Linear(2, 2)]}, "in the list 'encoders'"),
        (Holder(encoders=(nn.Linear(2, 2),)), "in the tuple 'encoders'"),
    ],
)
def test_what_has_no_models_by_name_is_refused(given: object, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        offload.extract_models(given)
