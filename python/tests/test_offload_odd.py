"""Weights that are odd: FP8 that is the model's own, sparse tensors, TorchScript, training checkpoints with tensors beside the
weights, names and paths that are none. They load as what they are, or an error says what they are."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
import torch
from offload_files import Small, empty, same, small, weights
from safetensors.torch import load_file
from torch import nn

from weightstream import CheckpointError, UnsafeCheckpointError, WeightsError, offload


class Table(nn.Module):
    """A parameter and a buffer whose own code knows what they mean."""

    def __init__(self, numbers: torch.Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(numbers.clone(), requires_grad=False)
        self.register_buffer("codes", numbers.clone())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_fp8_that_the_model_has_itself_keeps_its_type(tmp_path: Path, dtype: torch.dtype) -> None:
    model = Table(torch.arange(16.0).reshape(4, 4).to(dtype))
    offload.save_model(model, tmp_path / "x.safetensors")
    as_it_is, default = Table(torch.zeros(4, 4).to(dtype)), Table(torch.zeros(4, 4).to(dtype))
    offload.load_model_data(as_it_is, tmp_path / "x.safetensors", default_dtype=None)
    offload.load_model_data(default, tmp_path / "x.safetensors")
    for loaded in (as_it_is.rows, as_it_is.codes, default.codes):
        assert loaded.dtype == dtype
        assert same(loaded.detach(), model.codes)
    assert same(default.rows.detach(), model.codes.to(torch.bfloat16))


def test_fp8_where_the_model_has_numbers_becomes_numbers(tmp_path: Path) -> None:
    model = Table(torch.arange(16.0).reshape(4, 4).to(torch.float8_e4m3fn))
    offload.save_model(model, tmp_path / "x.safetensors")
    loaded = Table(torch.zeros(4, 4))
    offload.load_model_data(loaded, tmp_path / "x.safetensors", default_dtype=None)
    assert same(loaded.rows.detach(), model.rows.float())


@pytest.mark.parametrize("given", ["pickle", "dictionary"])
def test_sparse_tensors_fill_no_model(tmp_path: Path, given: str) -> None:
    tensors = {"rows": torch.eye(4).to_sparse(), "codes": torch.eye(4)}
    torch.save(tensors, tmp_path / "x.pt")
    model = Table(torch.ones(4, 4))
    with pytest.raises(WeightsError, match=r"rows of .* is torch\.sparse_coo"):
        offload.load_model_data(model, tensors if given == "dictionary" else tmp_path / "x.pt")
    assert same(model.rows.detach(), torch.ones(4, 4))


def test_tensors_beside_the_weights_of_a_training_checkpoint_do_not_hide_them(tmp_path: Path) -> None:
    torch.save({"step": torch.tensor(3), "state_dict": weights(small())}, tmp_path / "x.pt")
    model = empty()
    offload.load_model_data(model, tmp_path / "x.pt", default_dtype=None)
    assert all(same(model.state_dict()[name], tensor) for name, tensor in small().state_dict().items())
    # A dictionary of settings under such a name is no reason to leave tensors.
    torch.save({"a": torch.ones(2), "params": {"rate": 0.1}}, tmp_path / "y.pt")
    assert set(offload.load_sd(tmp_path / "y.pt")[0]) == {"a"}


def test_a_torchscript_archive_is_called_so(tmp_path: Path) -> None:
    torch.jit.script(nn.Linear(2, 2)).save(tmp_path / "x.pt")
    with pytest.raises(UnsafeCheckpointError, match="TorchScript"):
        offload.load_sd(tmp_path / "x.pt")


def test_names_and_paths_that_are_none_are_refused() -> None:
    with pytest.raises(WeightsError, match="name a tensor 1, which is no text"):
        offload.load_model_data(small(), {1: torch.ones(2)})
    with pytest.raises(CheckpointError, match="null byte"):
        offload.load_sd("a\0b")


def test_a_filter_that_names_nothing_saves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(WeightsError, match="filter_sd"):
        offload.save_model(small(), path, filter_sd=["elsewhere"])
    assert not path.exists()
    name = next(name for name in Small().state_dict() if "." in name)
    offload.save_model(small(), path, filter_sd=name)
    assert name in load_file(path)


def test_a_path_of_bytes_is_written(tmp_path: Path) -> None:
    offload.save_model(nn.Linear(2, 2), os.fsencode(tmp_path / "x.safetensors"))
    assert set(load_file(tmp_path / "x.safetensors")) == {"weight", "bias"}


class Log:
    """What a program may have put in the place of standard error."""

    def write(self, text: str) -> None:
        pass


@pytest.mark.parametrize("closed", [False, True])
def test_a_load_needs_no_standard_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool) -> None:
    offload.save_model(small(), tmp_path / "x.safetensors")
    log = io.StringIO()
    log.close()
    monkeypatch.setattr(sys, "stderr", log if closed else Log())
    assert offload.load_sd(tmp_path / "x.safetensors")[0]
    offload.save_model(small(), tmp_path / "y.safetensors")


def test_what_cannot_be_reached_is_not_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.symlink("loop.safetensors", tmp_path / "loop.safetensors")
    with pytest.raises(CheckpointError, match=r"loop\.safetensors cannot be read: Too many levels of symbolic links"):
        offload.load_sd(tmp_path / "loop.safetensors")

    def refused(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", refused)  # whoever runs the tests may be allowed everything
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        offload.load_sd(tmp_path)
