"""Tiny models of many transformers and diffusers classes give the same bits attached as resident."""

from __future__ import annotations

import re
from typing import Any

import planning_models
import pytest
import torch
from attach_models import assert_same_state, host, same_bits, snapshot
from torch.utils._pytree import tree_leaves

import weightstream
from weightstream import BudgetError
from weightstream.steps import ModelSteps


def outputs(model: torch.nn.Module, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Every tensor the model gives."""
    with torch.inference_mode():
        result = model(**arguments)
    return [leaf for leaf in tree_leaves(dict(result) if isinstance(result, dict) else result) if torch.is_tensor(leaf)]


def smallest(model: torch.nn.Module) -> int:
    """The least budget, which the refusal of a smaller one names."""
    with pytest.raises(BudgetError, match="too small") as refused:
        weightstream.attach(model, device=host(), budget=1)
    return int(re.search(r"at least (?:[^,]*\()?(\d+) bytes", str(refused.value))[1])


@pytest.mark.parametrize("name", planning_models.MODELS)
def test_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    model, arguments = planning_models.make(name)
    expected = outputs(model, arguments)
    again = outputs(model, arguments)
    assert all(same_bits(*pair) for pair in zip(expected, again)), "the model itself is not deterministic"
    before = snapshot(model)
    budget = smallest(model)
    copies = 0
    for extra, order, everywhere in ((0, "lazy", True), (0, "random", False), (1 << 15, "random", True)):
        monkeypatch.setattr(ModelSteps, "everywhere", everywhere)
        device = host(order, seed=len(name))
        with weightstream.attach(model, device=device, budget=budget + extra) as attachment:
            for _ in range(3):
                streamed = outputs(model, arguments)
                assert len(streamed) == len(expected)
                assert all(same_bits(*pair) for pair in zip(streamed, expected))
            assert attachment.report()["engine"]["page_bytes_peak"] <= budget + extra
            copies += attachment.stats()["copies"]
    assert copies > 0
    assert_same_state(model, before)


def test_generate_of_a_language_model() -> None:
    pytest.importorskip("transformers")
    model, arguments = planning_models.make("llama")
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**arguments, **settings)
    with weightstream.attach(model, device=host(), budget=smallest(model)) as attachment:
        assert torch.equal(model.generate(**arguments, **settings), expected)
        assert torch.equal(model.generate(**arguments, **settings), expected)
        assert attachment.stats()["steps"] == 16


def test_encode_and_decode_of_an_autoencoder_without_its_forward() -> None:
    pytest.importorskip("diffusers")
    model, arguments = planning_models.make("autoencoder_kl")
    image = next(value for value in arguments.values() if torch.is_tensor(value))

    def both() -> list[torch.Tensor]:
        with torch.inference_mode():
            latent = model.encode(image).latent_dist.mean
            return [latent, model.decode(latent).sample]

    expected = both()
    with weightstream.attach(model, device=host("lazy"), budget=smallest(model)) as attachment:
        for _ in range(3):
            assert all(same_bits(*pair) for pair in zip(both(), expected))
        assert attachment.stats()["steps"] == 0 and attachment.stats()["copies"] > 0
