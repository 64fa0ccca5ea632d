"""The two example scripts, as people start them, on a tiny pipeline: their reports, their checks and their options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from weightstream import startup

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples" / "benchmark"
IMPORTS = ["import.torch", "import.diffusers", "import.weightstream"]


def started(script: str, *options: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs one of the scripts on the CPU."""
    command = [sys.executable, str(EXAMPLES / script), "--device", "cpu", *map(str, options)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    variables.pop("PYTHONSAFEPATH", None)  # of the tests; the scripts find what lies beside them
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=variables)


def tops(report: dict[str, Any]) -> list[str]:
    """The names of phases that lie in no other."""
    return [phase["name"] for phase in report["phases"] if phase["parent_id"] is None]


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pipeline that `--tiny` makes, made once."""
    folder = tmp_path_factory.mktemp("wan")
    subprocess.run([sys.executable, str(EXAMPLES / "tiny_wan.py"), str(folder)], check=True, timeout=600)
    return folder


def test_the_start_of_a_vae(tmp_path: Path) -> None:
    output, tensor = tmp_path / "vae.json", tmp_path / "vae.pt"
    done = started("vae_startup.py", "--tiny", "--output", output, "--tensor-output", tensor, "--synchronize")
    assert done.returncode == 0, done.stderr
    assert "vae.weight_assignment" in done.stdout
    report = json.loads(output.read_text())
    assert tops(report) == [*IMPORTS, "device_setup", "component.vae", "first_decode"]
    facts = report["environment"]
    assert facts["cuda_initialized_before_device_setup"] is False
    assert facts["synchronized"] is True and facts["tiny"] is True and facts["device"] == "cpu"
    assert facts["checkpoints"][0]["file"].endswith(".safetensors")
    assert all(phase["sync_before"] > 0 for phase in report["phases"])
    frames = torch.load(tensor)
    assert frames.shape == (1, 3, 9, 128, 128) and bool(torch.isfinite(frames).all())
    assert startup.load(output).to_dict() == report


def test_the_start_of_a_pipeline_plain_and_sharded(wan: Path, tmp_path: Path) -> None:
    frames = []
    for options in ([], ["--fsdp"]):
        output, tensor = tmp_path / f"wan{len(options)}.json", tmp_path / f"wan{len(options)}.pt"
        given = ["--model-path", wan, "--output", output, "--tensor-output", tensor, *options]
        # What a launcher says of the rendezvous is kept.
        done = started("wan_pipeline_startup.py", *given, MASTER_ADDR="localhost")
        assert done.returncode == 0, done.stderr
        report = json.loads(output.read_text())
        assert tops(report) == [*IMPORTS, "pipeline.create", "first_request"]
        names = [phase["name"] for phase in report["phases"]]
        components = {name for name in names if name.startswith("component.")}
        assert components == {
            f"component.{part}" for part in ("scheduler", "text_encoder", "tokenizer", "transformer", "vae")
        }
        assert {"transformer.shard_setup", "text_encoder.offload_setup", "vae.finalize"} <= set(names)
        facts = report["environment"]
        assert facts["requested"] == {"fsdp": bool(options)}
        assert facts["settings"]["fsdp"] == {"text_encoder": False, "transformer": bool(options), "vae": False}
        assert not any(facts["settings"]["streamed"].values())
        assert facts["synchronized"] is False and report["synchronization"] == 0
        frames.append(torch.load(tensor))
    assert frames[0].shape == (1, 9, 3, 128, 128)
    assert torch.equal(*frames)


def test_what_cannot_be_started_says_so(tmp_path: Path) -> None:
    output = tmp_path / "a.json"
    done = started("vae_startup.py", "--output", output)
    assert done.returncode == 2 and "--model-path" in done.stderr
    done = started("vae_startup.py", "--model-path", tmp_path / "missing", "--output", output)
    assert done.returncode == 1 and "CheckpointError" in done.stderr
    assert not output.exists()
