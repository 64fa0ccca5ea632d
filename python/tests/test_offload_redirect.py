"""redirect_safetensors: other libraries load through us while it is in force, and afterwards all is as it was."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from offload_files import same, small, weights, write

import weightstream
from weightstream import CheckpointError, StateError, offload

safetensors = pytest.importorskip("safetensors")
official = pytest.importorskip("safetensors.torch")


def references() -> dict[tuple[str, str], int]:
    """Where any module holds one of the functions in question."""
    wanted = {id(safetensors.safe_open), id(official.load_file)}
    found = {}
    for name, module in list(sys.modules.items()):
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in wanted:
                found[name, key] = id(value)
    return found


def test_references_that_modules_hold_are_reached_and_put_back(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    offload.save_model(small(), path)
    user = types.ModuleType("someone_elses_module")
    user.opener, user.load = safetensors.safe_open, official.load_file
    sys.modules["someone_elses_module"] = user
    try:
        before = references()
        assert {key for key in before if key[0] == "someone_elses_module"} == {
            ("someone_elses_module", "opener"),
            ("someone_elses_module", "load"),
        }
        with offload.redirect_safetensors() as redirection:
            assert not set(references().values()) & set(before.values())
            assert set(references()) == set(before)
            assert str(path) not in Path("/proc/self/maps").read_text()
            sd = user.load(path)
            assert weightstream._native.mapped(sd["embed.weight"].data_ptr(), 8) is not None
            late = types.ModuleType("imported_later")
            late.safe_open = safetensors.safe_open
            sys.modules["imported_later"] = late
            with pytest.raises(StateError, match="already"):
                offload.redirect_safetensors()
        assert late.safe_open is safetensors.safe_open
        del sys.modules["imported_later"]
        assert references() == before
        redirection.undo()
        assert references() == before
    finally:
        sys.modules.pop("someone_elses_module", None)
        sys.modules.pop("imported_later", None)


def test_it_is_undone_after_an_error() -> None:
    before = references()
    with pytest.raises(KeyError), offload.redirect_safetensors():
        raise KeyError
    assert references() == before


def test_what_it_opens_answers_as_the_original(tmp_path: Path) -> None:
    tensors = {**weights(small()), "scalar": torch.tensor(3.0), "odd": torch.arange(3, dtype=torch.uint8)}
    path = write(tmp_path / "x.safetensors", tensors, {"a": "b"})
    bare = write(tmp_path / "bare.safetensors", {"w": torch.arange(24.0).view(4, 6)})
    original = safetensors.safe_open
    with offload.redirect_safetensors():
        with (
            safetensors.safe_open(path, framework="pt", device="cpu") as ours,
            original(path, framework="pt") as theirs,
        ):
            assert list(ours.keys()) == list(theirs.keys()) and ours.metadata() == theirs.metadata()
            if hasattr(theirs, "offset_keys"):
                assert ours.offset_keys() == theirs.offset_keys()
            assert all(same(ours.get_tensor(name), theirs.get_tensor(name)) for name in theirs.keys())
        assert set(safetensors.safe_open(path, framework="pt").get_tensors()) == set(tensors)
        ours, theirs = safetensors.safe_open(bare, "pt"), original(bare, "pt")
        assert ours.metadata() == theirs.metadata()
        one, other = ours.get_slice("w"), theirs.get_slice("w")
        assert one.get_shape() == other.get_shape() and one.get_dtype() == other.get_dtype()
        for key in (0, -1, slice(1, 3), (slice(None), slice(2, 4)), (..., 1), slice(None)):
            assert same(one[key].contiguous(), other[key])
        assert set(official.load_file(path)) == set(tensors)
        assert safetensors.safe_open(path, framework="np").get_tensor("scalar") == 3.0


def test_errors_are_theirs_too(tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"123")
    path = write(tmp_path / "x-00001-of-00002.safetensors", {"w": torch.zeros(1)})
    with offload.redirect_safetensors():
        for kind in (safetensors.SafetensorError, CheckpointError):
            with pytest.raises(kind):
                official.load_file(tmp_path / "bad.safetensors")
            with pytest.raises(kind, match="nope"):
                safetensors.safe_open(path, "pt").get_tensor("nope")
        with pytest.raises(FileNotFoundError):
            safetensors.safe_open(tmp_path / "nowhere", "pt")
        assert list(official.load_file(path)) == ["w"], "a shard by itself is one file"


def test_transformers_loads_through_it_and_is_put_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(tmp_path)
    before = references()
    plain = transformers.BertModel.from_pretrained(tmp_path)
    with offload.redirect_safetensors():
        model = transformers.BertModel.from_pretrained(tmp_path)
    assert references() == before
    assert all(same(model.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    assert any(weightstream._native.mapped(address, 4) for address in addresses)
