"""Pickles: tensors and nothing else, mapped where they can be; code in them never runs."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from offload_files import empty, same, small, weights

from weightstream import CheckpointError, UnsafeCheckpointError, offload
from weightstream.offload.pickles import load_pickle


class Stopped(Exception):
    """What whoever watches raises."""


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", ["model.pt", "model.bin", "model.pth"])
def test_both_formats_load_by_any_name(tmp_path: Path, legacy: bool, name: str) -> None:
    model = small()
    torch.save(weights(model), tmp_path / name, _use_new_zipfile_serialization=not legacy)
    sd, quantization_map, tied_map = offload.load_sd(tmp_path / name)
    assert (quantization_map, tied_map) == (None, None)
    assert all(same(sd[key], tensor) for key, tensor in weights(model).items())
    loaded = empty()
    offload.load_model_data(loaded, tmp_path / name, default_dtype=None)
    assert all(same(loaded.state_dict()[key], tensor) for key, tensor in model.state_dict().items())


def test_archives_are_mapped_and_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.rand(512, 512)}, path)
    before = path.read_bytes()
    sd, _, _ = offload.load_sd(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    sd["w"].zero_()
    assert path.read_bytes() == before


@pytest.mark.parametrize("wrapper", ["state_dict", "model", "module", "params_ema"])
def test_weights_of_training_checkpoints_are_found(tmp_path: Path, wrapper: str) -> None:
    torch.save({"epoch": 3, wrapper: weights(small()), "args": {"lr": 0.1}}, tmp_path / "x.pt")
    assert set(offload.load_sd(tmp_path / "x.pt")[0]) == set(weights(small()))


class Runs:
    """Unpickling it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


@pytest.mark.parametrize("legacy", [False, True])
def test_code_is_refused_and_never_runs(tmp_path: Path, legacy: bool) -> None:
    mark = tmp_path / "ran"
    path = tmp_path / "evil.bin"
    torch.save({"w": torch.zeros(1), "x": Runs(f"touch {mark}")}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(UnsafeCheckpointError, match="evil.bin holds more than tensors"):
        offload.load_sd(path)
    plain = tmp_path / "plain.pt"
    plain.write_bytes(pickle.dumps({"x": Runs(f"touch {mark}")}))
    with pytest.raises(CheckpointError, match="plain.pt"):
        offload.load_sd(plain)
    assert not mark.exists()


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    torch.save([torch.zeros(1)], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="holds a list"):
        offload.load_sd(tmp_path / "list.pt")
    torch.save({"epoch": 1}, tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="holds no tensors"):
        offload.load_sd(tmp_path / "none.pt")
    torch.save({"w": torch.zeros(1000)}, tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:900])
    with pytest.raises(CheckpointError, match="cut.pt"):
        offload.load_sd(tmp_path / "cut.pt")
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data.pkl", bytes(1 << 20))
    with pytest.raises(CheckpointError, match=r"bomb/data\.pkl is compressed"):
        offload.load_sd(tmp_path / "bomb.pt")


def test_an_index_of_pickles(tmp_path: Path) -> None:
    names = list(weights(small()).items())
    files = {"pytorch_model-00001-of-00002.bin": dict(names[:4]), "pytorch_model-00002-of-00002.bin": dict(names[4:])}
    weight_map = {}
    for file, part in files.items():
        torch.save(part, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    for given in (index, tmp_path):
        assert set(offload.load_sd(given)[0]) == set(dict(names))
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match="pytorch_model-00002-of-00002.bin"):
        offload.load_sd(index)
    index.write_text(json.dumps({"weight_map": {"a": "../a.bin"}}))
    with pytest.raises(CheckpointError, match="leaves its folder"):
        offload.load_sd(index)


@pytest.mark.parametrize("stop", [Stopped, KeyboardInterrupt])
def test_reading_the_older_format_is_stopped_within_a_few_pieces(tmp_path: Path, stop: type[BaseException]) -> None:
    path = tmp_path / "model.pt"
    tensors = {"a": torch.rand(48 << 18), "b": torch.rand(48 << 18)}
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    seen: list[float] = []

    def poll(done: float) -> None:
        seen.append(done)
        if done > 0.3:
            raise stop

    with pytest.raises(stop):
        load_pickle(str(path), poll)
    # Pieces of 16 MiB in 96: it stopped with the first that passed the mark.
    assert 0.3 < seen[-1] < 0.5 and all(done <= 0.3 for done in seen[:-1])
    loaded = load_pickle(str(path), seen.append)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert max(seen) > 0.8


@pytest.mark.parametrize("legacy", [False, True])
def test_tensors_without_data_are_refused_by_name(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "model.pt"
    torch.save(
        {"there": torch.ones(2), "gone": torch.ones(2, device="meta")}, path, _use_new_zipfile_serialization=not legacy
    )
    with pytest.raises(CheckpointError, match="no data for gone: saved from the meta device"):
        offload.load_sd(path)
