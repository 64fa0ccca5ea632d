"""What a file says of its model, broken in every way: plain weights load, and who needs what is broken is told its name."""

from __future__ import annotations

import base64
import json
import random
import warnings
from pathlib import Path

import pytest
import torch
from offload_files import Small, encoded, same, small, weights, write

from weightstream import CheckpointError, ConfigError, QuantizationError, WeightstreamError, offload, quant_router

BROKEN = {
    "no base64": "not base64!",
    "no utf-8": base64.b64encode(b"\xff\xfe").decode(),
    "no json": base64.b64encode(b"{").decode(),
    "cut": encoded({"_class_name": "Small"})[:-3],
    "a list": encoded([1, 2]),
    "deep": base64.b64encode(b"[" * 200_000).decode(),
}


def fits(model: torch.nn.Module, expected: torch.nn.Module) -> bool:
    """Whether two models have the same bits under the same names."""
    state, wanted = model.state_dict(), expected.state_dict()
    return list(state) == list(wanted) and all(same(state[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN)
def test_a_broken_configuration_is_a_warning_and_an_error_for_who_asks_for_it(tmp_path: Path, value: str) -> None:
    path = write(tmp_path / "x.safetensors", weights(small()), {"config_base64": value, "title": "x"})
    with pytest.warns(
        UserWarning, match=r"x\.safetensors: config_base64 in its metadata .*loaded without it"
    ) as warned:
        sd, _, _ = offload.load_sd(path)
    assert warned[0].filename == __file__
    assert set(sd) == set(weights(small())) and any("config_base64" in note for note in sd.report["notes"])
    model = small(1)
    with pytest.warns(UserWarning, match="config_base64"):
        offload.load_model_data(model, path, default_dtype=None)
    assert fits(model, small())
    assert quant_router.detect(path) == {} and quant_router.detect_quantization_kind_for_file(path) is None
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config_base64 in its metadata .*forcedConfigPath"):
        offload.fast_load_transformers_model(path, modelClass=Small)
    (tmp_path / "right.json").write_text('{"_class_name": "Small"}')
    with pytest.warns(UserWarning, match="config_base64"):
        given = offload.fast_load_transformers_model(
            path, modelClass=Small, forcedConfigPath=tmp_path / "right.json", default_dtype=None
        )
    assert fits(given, small()) and given._config == {"_class_name": "Small"}


@pytest.mark.parametrize("value", [*list(BROKEN.values())[:4], encoded({"embed.weight": "head.weight"})])
def test_a_broken_map_of_tied_weights_is_a_warning(tmp_path: Path, value: str) -> None:
    path = write(tmp_path / "x.safetensors", weights(small()), {"tied_weights_map_base64": value})
    model = small(1)
    with pytest.warns(UserWarning, match="tied"):
        offload.load_model_data(model, path, default_dtype=None)
    assert fits(model, small()) and model.head.weight is model.embed.weight  # as the model has it
    with pytest.warns(UserWarning, match="tied"):
        assert offload.load_sd(path)[2] is None


def test_a_remark_under_config_is_nobodys_business(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", weights(small()), {"config": "made on a Tuesday"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        offload.load_model_data(small(), path, default_dtype=None)


def test_layers_that_a_broken_configuration_may_speak_of_are_refused(tmp_path: Path) -> None:
    words = torch.zeros(16, 64, dtype=torch.int32)
    gptq = {"lin.qweight": words, "lin.qzeros": words[:2, :8].clone(), "lin.scales": torch.ones(2, 64).half()}
    path = write(tmp_path / "x.safetensors", gptq, {"config_base64": BROKEN["cut"]})
    model = torch.nn.ModuleDict({"lin": torch.nn.Linear(128, 64, bias=False)})
    with pytest.warns(UserWarning), pytest.raises(QuantizationError, match=r'"config_base64" .*"lin\.weight"'):
        offload.load_model_data(model, path)
    assert type(model["lin"]) is torch.nn.Linear
    # What it says may be in the file's folder.
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    with pytest.warns(UserWarning, match="config_base64"):
        offload.load_model_data(model, path)
    assert type(model["lin"]) is not torch.nn.Linear


def test_descriptions_of_layers_in_two_files_are_put_together_or_refused(tmp_path: Path) -> None:
    deep = '{"layers": ' + "[" * 100_000
    paths = [
        write(tmp_path / f"{name}.safetensors", {f"{name}.weight": torch.ones(2, 2)}, {"_quantization_metadata": text})
        for name, text in (("a", deep), ("b", '{"layers": {}}'))
    ]
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in "ab"})
    for order in (paths, paths[::-1]):
        with pytest.raises(QuantizationError, match="_quantization_metadata"):
            offload.load_model_data(model, order)


def test_any_metadata_is_read_or_refused_with_a_typed_error(tmp_path: Path) -> None:
    chance = random.Random(0)
    keys = ["config", "quantization_map", "tied_weights_map", "quantization_config", "_quantization_metadata"]
    values = [None, [], {}, 3, "x", -1e300, {"a": None}, {"layers": []}, {"a": ["b"]}, {"a": {"weights": 3}}, [[]]]
    ways = {True: 0, False: 0}
    for _ in range(400):
        metadata = {}
        for key in chance.sample(keys, 2):
            text = json.dumps(chance.choice(values)).encode()
            if chance.random() < 0.5:
                at = chance.randrange(len(text) + 1)
                text = text[:at] + chance.randbytes(chance.randrange(4)) + text[at + chance.randrange(3) :]
            if chance.random() < 0.6:
                metadata[f"{key}_base64"] = base64.b64encode(text).decode()
            else:
                metadata[key] = text.decode("latin-1")
        path = write(tmp_path / "x.safetensors", {"a.weight": torch.ones(2, 2)}, metadata)
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2, bias=False)})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for read in (
                lambda: offload.load_model_data(model, path),
                lambda: offload.load_sd(path),
                lambda: quant_router.detect(path),
            ):
                try:
                    read()
                    ways[True] += 1
                except WeightstreamError as error:
                    assert isinstance(error, (CheckpointError, QuantizationError)), error
                    ways[False] += 1
    assert all(ways.values()), ways
