"""Models in several files: every shard is read with its maps, and what is missing or strays is said before anything loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from offload_files import empty, encoded, same, small, weights, write

from weightstream import CheckpointError, offload

KEYS = {"a": ["k0", "k1"], "b": ["k2", "k3"], "c": ["k4", "k5"]}


def sharded(folder: Path, index: str = "model.safetensors.index.json") -> Path:
    """Three shards of six keys, each holding its number."""
    weight_map = {}
    for file, keys in KEYS.items():
        tensors = {key: torch.full((4,), float(key[1:]), dtype=torch.bfloat16) for key in keys}
        write(folder / f"{file}.safetensors", tensors)
        weight_map |= dict.fromkeys(keys, f"{file}.safetensors")
    path = folder / index
    path.write_text(json.dumps({"metadata": {"total_size": 48}, "weight_map": weight_map}))
    return path


def test_twelve_shards_load_with_their_maps(tmp_path: Path) -> None:
    model = small()
    names = list(weights(model).items())
    parts = [dict(names[number::12]) for number in range(12)]
    assert all(parts)
    for number, part in enumerate(parts, 1):
        metadata = {"quantization_map_base64": encoded({f"shard{number}": {"weights": "none"}})}
        if "embed.weight" in part:
            metadata["tied_weights_map_base64"] = encoded({"embed.weight": ["head.weight"]})
        write(tmp_path / f"my-model-{number:05}-of-00012.safetensors", part, metadata)
    sd, quantization_map, tied_map = offload.load_sd(tmp_path / "my-model-00011-of-00012.safetensors")
    assert all(same(sd[name], tensor) for name, tensor in names) and len(sd) == len(names)
    assert sorted(quantization_map) == sorted(f"shard{number}" for number in range(1, 13))
    assert tied_map == {"embed.weight": ["head.weight"]}
    assert len(sd.report["files"]) == 12


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json"])
def test_an_index_and_its_folder(tmp_path: Path, index: str) -> None:
    path = sharded(tmp_path, index)
    for given in (path, tmp_path):
        sd, _, _ = offload.load_sd(given)
        assert {name: tensor[0].item() for name, tensor in sd.items()} == {f"k{n}": float(n) for n in range(6)}


def test_missing_shards_are_all_named(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match="b.safetensors"):
        offload.load_sd(path)
    for file in ("a", "c"):
        (tmp_path / f"{file}.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"a\.safetensors.*b\.safetensors.*c\.safetensors"):
        offload.load_sd(path)


def test_a_stray_file_is_left_out_and_said(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    write(tmp_path / "model.safetensors", {f"k{n}": torch.ones(4, dtype=torch.int8) for n in range(6)})
    sd, _, _ = offload.load_sd(path)
    assert sd["k3"].dtype == torch.bfloat16
    assert any("model.safetensors" in note for note in sd.report["notes"])


def edit(path: Path, **weight_map: str) -> None:
    index = json.loads(path.read_text())
    index["weight_map"].update(weight_map)
    path.write_text(json.dumps(index))


def test_an_index_that_does_not_fit_its_shards(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    edit(path, k9="c.safetensors")
    with pytest.raises(CheckpointError, match=r"k9.*c\.safetensors"):
        offload.load_sd(path)
    sharded(tmp_path)
    write(tmp_path / "b.safetensors", {key: torch.zeros(4, dtype=torch.bfloat16) for key in ("k2", "k3", "k5")})
    with pytest.raises(CheckpointError, match=r"b\.safetensors.*c\.safetensors.*k5"):
        offload.load_sd(path)
    path.write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map"):
        offload.load_sd(path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../b.safetensors", "..", ""])
def test_names_that_leave_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "x.safetensors", {"k0": torch.zeros(1)})
    path = sharded(tmp_path / "in")
    edit(path, k0=name)
    with pytest.raises(CheckpointError):
        offload.load_sd(path)


def test_a_list_of_files_is_one_model_and_no_name_wins_twice(tmp_path: Path) -> None:
    model = small()
    names = list(weights(model).items())
    first = write(tmp_path / "first.safetensors", dict(names[:5]))
    second = write(tmp_path / "second.safetensors", dict(names[5:]))
    loaded = empty()
    offload.load_model_data(loaded, [str(first), second], default_dtype=None)
    assert all(same(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    third = write(tmp_path / "third.safetensors", dict(names[:1]))
    with pytest.raises(CheckpointError, match=rf"{names[0][0]}.*first\.safetensors.*third\.safetensors"):
        offload.load_sd([first, second, third])


def test_all_shards_given_one_by_one_are_read_once(tmp_path: Path) -> None:
    paths = []
    for number in (1, 2, 3):
        paths.append(tmp_path / f"model-{number:05}-of-00003.safetensors")
        safetensors.torch.save_file({f"k{number}": torch.full((2,), float(number))}, paths[-1])
    sd, _, _ = offload.load_sd(paths)
    assert {name: value.tolist() for name, value in sd.items()} == {f"k{n}": [float(n)] * 2 for n in (1, 2, 3)}
