"""load_sd on safetensors files: every legal file equals the official reader, every broken one is an error that says how."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import safetensors.torch
import torch
from offload_files import SPELLED, encoded, same, write

from weightstream import CheckpointError, ConfigError, WeightsError, offload, quant_router


def everything() -> dict[str, torch.Tensor]:
    """A tensor of each type and odd shapes, with lengths that put most of them at odd addresses."""
    torch.manual_seed(0)
    found = {}
    for number, (dtype, name) in enumerate(SPELLED.items()):
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (2 * (number % 3 + 1) * dtype.itemsize,))
        found[f"t.{name}"] = raw.to(torch.uint8).view(dtype).view(2, -1)
    return {
        "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
        **found,
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 7),
    }


def test_every_type_and_shape_equals_the_official_reader(tmp_path: Path) -> None:
    official = pytest.importorskip("safetensors.torch")
    tensors = everything()
    for pad in range(9):
        path = write(tmp_path / f"{pad}.safetensors", tensors, pad=pad, header_order=sorted(tensors, reverse=True))
        sd, quantization_map, tied_map = offload.load_sd(path)
        expected = official.load_file(path)
        assert set(sd) == set(expected) and quantization_map is None and tied_map is None
        assert all(same(sd[name], expected[name]) for name in expected)
        assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in sd.values())


def test_an_order_of_the_header_that_is_not_the_datas(tmp_path: Path) -> None:
    tensors = {"a": torch.full((4,), 1.0), "b": torch.full((4,), 2.0), "c": torch.full((4,), 3.0)}
    path = write(tmp_path / "x.safetensors", tensors, header_order=["c", "a", "b"])
    sd, _, _ = offload.load_sd(path)
    assert {name: tensor[0].item() for name, tensor in sd.items()} == {"a": 1, "b": 2, "c": 3}


def test_only_misaligned_tensors_are_copied_and_counted(tmp_path: Path) -> None:
    tensors = {
        "u8": torch.arange(3, dtype=torch.uint8),
        "f32": torch.rand(5),
        "bf16": torch.rand(7).bfloat16(),
        "f8": torch.rand(1).to(torch.float8_e4m3fn),
        "i64": torch.arange(2),
        "f16": torch.empty(0, dtype=torch.float16),
    }
    path = write(tmp_path / "odd.safetensors", tensors)
    header = int.from_bytes(path.read_bytes()[:8], "little")
    path = write(tmp_path / "odd.safetensors", tensors, pad=(2 - header) % 4)
    sd, _, _ = offload.load_sd(path)
    assert all(same(sd[name], tensor) for name, tensor in tensors.items())
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    copied, at = 0, start
    for tensor in tensors.values():
        copied += tensor.nbytes if at % tensor.element_size() else 0
        at += tensor.nbytes
    assert sd.report["copied_bytes"] == copied > 0
    aligned = write(tmp_path / "even.safetensors", {"w": torch.rand(64, 64)}, pad=0)
    header = int.from_bytes(aligned.read_bytes()[:8], "little")
    aligned = write(tmp_path / "even.safetensors", {"w": torch.rand(64, 64)}, pad=-header % 8)
    assert offload.load_sd(aligned)[0].report["copied_bytes"] == 0


@pytest.mark.parametrize("writable", [True, False])
def test_tensors_are_the_files_pages_and_writes_stay_here(tmp_path: Path, writable: bool) -> None:
    offload.save_model(torch.nn.Linear(512, 512), tmp_path / "x.safetensors")
    before = (tmp_path / "x.safetensors").read_bytes()
    sd, _, _ = offload.load_sd(tmp_path / "x.safetensors", writable_tensors=writable)
    maps = Path("/proc/self/maps").read_text()
    mapped = [line for line in maps.splitlines() if line.endswith("x.safetensors")]
    ranges = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in mapped]
    assert any(first <= sd["weight"].data_ptr() < end for first, end in ranges)
    again, _, _ = offload.load_sd(tmp_path / "x.safetensors")
    sd["weight"].fill_(7)
    assert (tmp_path / "x.safetensors").read_bytes() == before
    assert not (again["weight"] == 7).any()
    assert sd["weight"].untyped_storage().nbytes() == 512 * 512 * 4, "each tensor holds its own bytes only"


def test_a_tensor_outlives_everything_it_came_with(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"w": torch.arange(1000.0), "v": torch.zeros(3)})
    kept = offload.load_sd(path)[0]["w"]
    os.unlink(path)
    assert torch.equal(kept, torch.arange(1000.0))
    del kept
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_filters(tmp_path: Path) -> None:
    names = ["blocks.0.w", "blocks.1.w", "blockset.w", "head.w"]
    path = write(tmp_path / "x.safetensors", {name: torch.zeros(1) for name in names})
    keys = lambda *args, **options: list(offload.load_sd(path, *args, **options)[0])  # noqa: E731
    assert keys("blocks.") == keys(["blocks."]) == ["0.w", "1.w"]
    assert keys(["blocks.", "head."], keep_prefixes=True) == ["blocks.0.w", "blocks.1.w", "head.w"]
    assert keys("head") == ["w"]
    assert keys("nothing") == []
    with pytest.raises(WeightsError, match=r"blocks\.1\.w would be named w"):
        keys(["blocks.0", "blocks.1"])


def test_what_is_filtered_out_is_not_read(tmp_path: Path) -> None:
    tensors = {"odd": torch.zeros(1, dtype=torch.uint8), **{f"b{number}.w": torch.rand(1000) for number in range(10)}}
    path = write(tmp_path / "x.safetensors", tensors)
    header = int.from_bytes(path.read_bytes()[:8], "little")
    path = write(tmp_path / "x.safetensors", tensors, pad=-header % 8)
    assert offload.load_sd(path)[0].report["copied_bytes"] == 40_000, "every one is at an odd address"
    sd, _, _ = offload.load_sd(path, filters="b3.")
    assert list(sd) == ["w"] and sd.report["copied_bytes"] == 4000


SCRIPT = """
    import sys
    from pathlib import Path
    from weightstream import offload

    def private():
        fields = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
        return int(fields["Anonymous"].split()[0])

    offload.load_sd(sys.argv[2])
    before = private()
    sd, _, _ = offload.load_sd(sys.argv[1], writable_tensors=False)
    total = sum(tensor.sum().item() for tensor in sd.values())
    print(private() - before)
"""


def test_reading_every_byte_takes_no_memory_of_ones_own(tmp_path: Path) -> None:
    layers = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(4)])
    offload.save_model(layers, tmp_path / "x.safetensors")
    offload.save_model(torch.nn.Linear(2, 2), tmp_path / "y.safetensors")
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(SCRIPT),
        str(tmp_path / "x.safetensors"),
        str(tmp_path / "y.safetensors"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 0.05 * (tmp_path / "x.safetensors").stat().st_size


def test_a_filter_that_no_name_begins_with_is_noted_with_the_nearest_that_one_does(tmp_path: Path) -> None:
    tensors = {"vae.encoder.weight": torch.ones(1), "unet.weight": torch.ones(1), "unet.bias": torch.ones(1)}
    path = write(tmp_path / "x.safetensors", tensors)
    for filters, kept, said in (
        (iter(["vae.", "unte."]), {"encoder.weight"}, ["begins with 'unte.'; did you mean 'unet'?"]),
        (["vae.encodr", "zzz", "unet."], {"weight", "bias"}, ["'vae.encodr'; did you mean 'vae.encoder'?", "'zzz'"]),
        ("VAE", set(), ["begins with 'VAE'; did you mean 'vae'?"]),
        (["vae.", "unet.b"], {"encoder.weight", "ias"}, []),
    ):
        sd, _, _ = offload.load_sd(path, filters)
        assert set(sd) == kept
        notes = [note for note in sd.report["notes"] if "no weight whose name begins" in note]
        assert len(notes) == len(said) and all(note.endswith(end) for note, end in zip(notes, said)), notes


def test_maps_come_from_the_metadata(tmp_path: Path) -> None:
    metadata = {
        "quantization_format": "quanto",
        "quantization_map_base64": encoded({"a": {"weights": "qint8", "activations": "none"}}),
        "tied_weights_map_base64": encoded({"a.weight": ["b.weight"]}),
    }
    path = write(tmp_path / "x.safetensors", {"a.weight": torch.zeros(1)}, metadata)
    sd, quantization_map, tied_map = offload.load_sd(path)
    assert quantization_map == {"a": {"weights": "qint8", "activations": "none"}}
    assert tied_map == {"a.weight": ["b.weight"]} and list(sd) == ["a.weight"]
    path = write(tmp_path / "y.safetensors", {"a.weight": torch.zeros(1)})
    (tmp_path / "y_map.json").write_text(json.dumps({"a": {"weights": "qint8"}}))
    assert offload.load_sd(path)[1] == {"a": {"weights": "qint8"}}
    for value in ("!", encoded([1]), encoded("x")):
        path = write(tmp_path / "z.safetensors", {"a": torch.zeros(1)}, {"quantization_map_base64": value})
        with pytest.raises(CheckpointError, match="quantization_map"):
            offload.load_sd(path)


def cut(path: Path, size: int) -> Path:
    """The file's first bytes."""
    shorter = path.with_name("cut.safetensors")
    shorter.write_bytes(path.read_bytes()[:size])
    return shorter


def test_each_broken_file_is_refused_in_words_of_its_own(tmp_path: Path) -> None:
    good = write(tmp_path / "good.safetensors", {"a": torch.rand(64), "last": torch.rand(64)})
    size = good.stat().st_size
    text = tmp_path / "text.safetensors"
    files = {
        "4 more": good.with_name("tail4.safetensors"),
        "4096 more": good.with_name("tail4096.safetensors"),
    }
    files["4 more"].write_bytes(good.read_bytes() + bytes(4))
    files["4096 more"].write_bytes(good.read_bytes() + bytes(4096))
    messages = {}
    for name, path in files.items():
        with pytest.raises(CheckpointError) as caught:
            offload.load_sd(path)
        messages[name] = str(caught.value)
    for name, length in {"in the last tensor": size - 10, "in the header": 40, "7 bytes": 7, "0 bytes": 0}.items():
        with pytest.raises(CheckpointError) as caught:
            offload.load_sd(cut(good, length))
        messages[name] = str(caught.value)
    contents = {
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9876543\n",
        "html": b"<!DOCTYPE html><html><body>not found</body></html>",
        "length 2^63": (1 << 63).to_bytes(8, "little") + b"{}",
    }
    for name, content in contents.items():
        text.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            offload.load_sd(text)
        messages[name] = str(caught.value)
    assert len(set(messages.values())) == len(messages), messages
    for number, message in {
        "4": messages["4 more"],
        "4096": messages["4096 more"],
        "last": messages["in the last tensor"],
    }.items():
        assert re.search(rf"\b{number}\b", message), message
    assert "LFS" in messages["lfs"] or "lfs" in messages["lfs"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere.safetensors does not exist"):
        offload.load_sd(tmp_path / "nowhere.safetensors")


def test_a_file_cut_after_opening_is_an_error_when_it_is_converted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.Linear(1024, 1024)
    offload.save_model(module, tmp_path / "x.safetensors")
    target = torch.nn.Linear(1024, 1024, device="meta")

    def cut_now(_: object) -> None:
        os.truncate(tmp_path / "x.safetensors", 8192)

    with pytest.raises(CheckpointError, match=r"x\.safetensors.*(bias|weight)|(bias|weight).*x\.safetensors"):
        offload.load_model_data(target, tmp_path / "x.safetensors", pre_load_callback=cut_now)
    assert target.weight.is_meta and target.bias.is_meta


def test_a_header_whose_length_begins_as_a_pickle_does_is_read(tmp_path: Path) -> None:
    """Lengths are multiples of 8: one in 32 has the first byte of a pickle, one in 16,384 its version, too."""
    seen = set()
    for letters in range(1, 700):
        path = tmp_path / "x.safetensors"
        safetensors.torch.save_file({"w" * letters: torch.arange(4.0)}, path)
        with open(path, "rb") as file:
            head = file.read(2)
        if head[0] == 0x80 and head not in seen:
            seen.add(head)
            assert torch.equal(offload.load_sd(path)[0]["w" * letters], torch.arange(4.0))
    assert {b"\x80\x00", b"\x80\x02"} <= seen


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError):
        offload.load_sd(tmp_path / "pipe")


def test_bytes_behind_the_last_tensor_are_read_over_where_that_is_asked_for(tmp_path: Path) -> None:
    weights = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.tensor([1.0, -1.0])}
    path = str(tmp_path / "model.safetensors")
    safetensors.torch.save_file(weights, path)
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole + b"more")

    def model() -> torch.nn.Module:
        with torch.device("meta"):
            return torch.nn.Linear(3, 2)

    for load in (
        lambda: offload.load_sd(path),
        lambda: offload.load_model_data(model(), path),
        lambda: offload.load_model_data(model(), {}, modules=[path]),
        lambda: offload.fast_load_transformers_model(path, forcedConfigPath={}),
        lambda: quant_router.detect(path),
        lambda: quant_router.detect_quantization_kind_for_file(path),
    ):
        with pytest.raises(CheckpointError, match="4 bytes follow its last tensor.*allow_trailing"):
            load()
    sd, _, _ = offload.load_sd(path, allow_trailing=True)
    assert all(same(sd[name], weights[name]) for name in weights)
    assert any("4 bytes" in note for note in sd.report["notes"])
    for source, modules in ((path, None), ({}, [path])):
        filled = model()
        offload.load_model_data(filled, source, modules=modules, default_dtype=None, allow_trailing=True)
        assert same(filled.weight, weights["weight"]) and same(filled.bias, weights["bias"])
    with pytest.raises(ConfigError):  # the file is read, and no class named in it
        offload.fast_load_transformers_model(path, forcedConfigPath={}, allow_trailing=True)
    assert quant_router.detect(path, allow_trailing=True) == {}
    assert quant_router.detect_quantization_kind_for_file(path, allow_trailing=True) is None
    # What is cut is an error all the same.
    Path(path).write_bytes(whole[:-1])
    with pytest.raises(CheckpointError):
        offload.load_sd(path, allow_trailing=True)
