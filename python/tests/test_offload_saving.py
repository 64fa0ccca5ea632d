"""save_model: one file with everything in it, which the official reader opens and loading gives back bit for bit."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import torch
from offload_files import Small, empty, same, small, weights
from torch import nn

import weightstream
from weightstream import CheckpointError, ModelError, NotAvailableError, WeightsError, offload


def saved(path: Path, model: nn.Module | None = None, **options: object) -> Path:
    offload.save_model(model or small(), path, **options)
    return path


def metadata(path: Path) -> dict[str, str]:
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__", {})


def config_in(path: Path) -> object:
    return json.loads(base64.b64decode(metadata(path)["config_base64"]))


def test_it_comes_back_bit_for_bit_and_the_official_reader_opens_it(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.safetensors")
    model = empty()
    offload.load_model_data(model, path, default_dtype=None)
    assert all(same(model.state_dict()[name], tensor) for name, tensor in small().state_dict().items())
    official = pytest.importorskip("safetensors.torch").load_file(path)
    assert set(official) == set(weights(small()))
    assert all(same(official[name], tensor) for name, tensor in weights(small()).items())


def test_tied_weights_are_stored_once_and_data_is_aligned(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.safetensors")
    assert json.loads(base64.b64decode(metadata(path)["tied_weights_map_base64"])) == {"embed.weight": ["head.weight"]}
    sd, _, tied = offload.load_sd(path)
    assert tied == {"embed.weight": ["head.weight"]} and "head.weight" not in sd
    assert sd.report["copied_bytes"] == 0
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert start % 4096 == 0


def test_a_model_saves_over_the_file_that_it_shows(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.safetensors")
    model = empty()
    offload.load_model_data(model, path, default_dtype=None)
    with torch.no_grad():
        model.blocks[0].weight.add_(1)
    saved(path, model)
    sd, _, _ = offload.load_sd(path)
    assert all(same(sd[name], tensor) for name, tensor in weights(model).items())
    assert not same(sd["blocks.0.weight"], small().blocks[0].weight)


def test_every_type_and_layout_a_model_may_have(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.uint8):
                self.register_buffer("b_" + str(dtype)[6:], torch.randint(0, 2, (3, 5)).to(dtype))
            self.transposed = nn.Parameter(torch.rand(4, 6).t())
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.nothing = nn.Parameter(torch.empty(0, 3))

    model = Odd()
    sd, _, _ = offload.load_sd(saved(tmp_path / "x.safetensors", model))
    assert all(same(sd[name], tensor) for name, tensor in model.state_dict().items())


def test_where_the_configuration_comes_from(tmp_path: Path) -> None:
    given = tmp_path / "given.json"
    given.write_text(json.dumps({"from": "path"}))
    assert "config_base64" not in metadata(saved(tmp_path / "a.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps({"from": "beside"}))
    assert config_in(saved(tmp_path / "a.safetensors")) == {"from": "beside"}
    model = small()
    model._config = {"from": "model"}
    assert config_in(saved(tmp_path / "a.safetensors", model)) == {"from": "model"}
    assert config_in(saved(tmp_path / "a.safetensors", model, config_file_path=given)) == {"from": "path"}
    with pytest.raises(CheckpointError, match="nope.json"):
        saved(tmp_path / "b.safetensors", model, config_file_path=tmp_path / "nope.json")
    assert not (tmp_path / "b.safetensors").exists()


def test_filters_keep_the_weights_of_modules(tmp_path: Path) -> None:
    def names(filters: object) -> set[str]:
        return set(offload.load_sd(saved(tmp_path / "x.safetensors", filter_sd=filters))[0])

    assert names(["blocks.1"]) == {"blocks.1.weight", "blocks.1.bias"}
    assert names(["blocks.1.weight"]) == {"blocks.1.weight", "blocks.1.bias"}
    assert names({"blocks": None}) == {f"blocks.{n}.{kind}" for n in range(3) for kind in ("weight", "bias")}


@pytest.mark.parametrize("quantize", [False, True])
def test_a_filter_with_a_misspelled_name_is_refused_and_says_the_right_one(tmp_path: Path, quantize: bool) -> None:
    path, model = tmp_path / "x.safetensors", small()
    for filters, said in (
        (["blocks.1", "block.2"], "names 1 of 2 .*: 'block.2', did you mean 'blocks.2'?"),
        (["blocks.1", "Norm.weight", "zzz"], "names 2 of 3 .*: 'Norm.weight', did you mean 'norm.weight'?; 'zzz'$"),
        ("blocks.1.wieght", "names 1 of 1 .*: 'blocks.1.wieght', did you mean 'blocks.1.weight'?"),
        ({"blocks", "frequencies"}, "'frequencies'"),  # a buffer that is never saved
        (["blocks", 3], "filter_sd has 3, which is no text"),
    ):
        with pytest.raises(WeightsError, match=said.replace("?", r"\?")):
            offload.save_model(model, path, filter_sd=filters, do_quantize=quantize)
    # Nothing was written, and nothing quantized before it was refused.
    assert not path.exists() and type(model.blocks[0]) is nn.Linear
    # A weight stands for its module, quantized or not.
    offload.save_model(model, path, filter_sd=iter(["blocks.0.weight", "norm."]), do_quantize=quantize)
    kept = set(offload.load_sd(path)[0])
    assert {"blocks.0.bias", "norm.weight"} <= kept
    assert all(name.startswith(("blocks.0.", "norm.")) for name in kept) and any(
        "blocks.0.weight" in name for name in kept
    )


def test_an_attached_model_saves_its_true_bytes(tmp_path: Path) -> None:
    model = small()
    with weightstream.attach(model, device="host", budget="64MiB", towers=["blocks"]):
        path = saved(tmp_path / "x.safetensors", model)
    sd, _, _ = offload.load_sd(path)
    assert all(same(sd[name], tensor) for name, tensor in weights(small()).items())


def test_a_refused_save_leaves_what_was_there(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.safetensors")
    before = path.read_bytes()
    with torch.device("meta"):
        unfilled = Small()
    for model, options, kind in (
        (unfilled, {}, ModelError),
        (small(), {"do_quantize": True, "quantizationType": "qint7"}, NotAvailableError),
        (sparse(), {}, NotAvailableError),
    ):
        with pytest.raises(kind):
            offload.save_model(model, path, **options)
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]
    with pytest.raises(CheckpointError):
        saved(tmp_path / "no folder" / "x.safetensors")


def sparse() -> nn.Module:
    model = nn.Module()
    model.register_buffer("s", torch.eye(3).to_sparse())
    return model
