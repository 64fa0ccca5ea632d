"""The measuring of the bench `ready`, with the CPU and the emulator in place of a GPU, and its page."""

import json
import pathlib

import pytest
import ready
import ready_task
import torch

BLOCKS = 6


@pytest.fixture
def small(no_gpu, monkeypatch):
    """Little to copy."""
    monkeypatch.setattr(ready_task, "CHUNK", 1 << 12)
    monkeypatch.setattr(ready_task, "ROUNDS", 2)


def test_a_written_model_is_loaded_streamed_and_staged_to_the_same_bits(small, tmp_path):
    file = tmp_path / "model.safetensors"
    with torch.inference_mode():
        written = ready_task.write(file, {"blocks": BLOCKS})
        assert written["file_bytes"] > written["model_bytes"] > 0
        budget = written["model_bytes"] // 2
        found = ready_task.ready(file, {"blocks": BLOCKS, "budget": budget, "seq": 16})
        assert found["ready_s"] >= found["load_s"] + found["attach_s"] and len(found["digest"]) == 64
        staged = ready_task.staged(file, {"blocks": BLOCKS, "budget": budget, "seqs": [4, 16]})
        assert [row["seq"] for row in staged["rows"]] == [4, 16]
        assert all(row["identical"] for row in staged["rows"])
        assert staged["host"]["registered_bytes"] == 0
        assert staged["host"]["file_bytes"] == written["model_bytes"]
        assert ready_task.copy_rate(file, threads=2) > 0


def test_limits_are_told_from_values():
    result = json.loads((pathlib.Path(ready.__file__).parents[2] / "docs/performance/ready.json").read_text())
    assert all(line["holds"] for line in ready.must_hold(result))
    result["ready"]["median_ready_s"] = 9.0
    result["staged"]["rows"][0]["staged_bytes_per_second"] /= 2
    missed = [line["what"] for line in ready.must_hold(result) if not line["holds"]]
    assert missed == ["seconds from the call to a first step", "staged rate of the rate of RAM copies, S=256"]


def test_the_page_tells_what_was_measured():
    result = json.loads((pathlib.Path(ready.__file__).parents[2] / "docs/performance/ready.json").read_text())
    result["ready"] |= {
        "load_s": 0.021,
        "attach_s": 0.66,
        "first_step_s": 0.559,
        "ready_s": 1.24,
        "anonymous_added": 74_400_000,
    }
    text = ready.page(result, "ready.json")
    assert "| alone | 0.02 | 0.66 | 0.56 | 1.24 | 74 |" in text and text.count("holds") == 6
