"""The measuring of the bench `lora`, with the CPU and the emulator in place of a GPU, and its page."""

import json

import dit
import lora
import pytest
import torch


def test_loras_are_measured_resident_streamed_and_beside_pefts(no_gpu, monkeypatch, tmp_path):
    pytest.importorskip("peft")
    model = dit.build(6)
    budget, names = dit.weight_bytes(model) // 2, set(dict(model.named_modules()))
    given = ["lora.py", "--blocks", 6, "--budget", budget, "--seq", 8, "--rank", 16, "--counts", "1,3", "--steps", 2]
    monkeypatch.setattr("sys.argv", [*map(str, given), "--bytes", str(1 << 20), "--out", str(tmp_path / "lora.json")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert lora.main() == 0
    result = json.loads((tmp_path / "lora.json").read_text())
    assert [row["loras"] for row in result["resident"]] == [row["loras"] for row in result["streamed"]] == [0, 1, 3]
    assert all(row["identical"] for row in result["streamed"])
    moved = [row["streamed_bytes_per_step"] for row in result["streamed"]]
    assert 0 < moved[0] < moved[1] < moved[2]
    assert all(row["peft_ms"] > 0 for row in result["resident"][1:])
    assert result["loading"]["bytes"] >= 1 << 20 and result["loading"]["seconds"] > 0
    limits = [line["limit"] for line in result["must_hold"]]
    assert limits == [1.05, 1.08, 1.02, 1.02, 0, 0.3]
    monkeypatch.setattr(
        "sys.argv", ["lora.py", "--page", str(tmp_path / "lora.json"), "--out", str(tmp_path / "page.md")]
    )
    assert lora.main() == 0 and (tmp_path / "page.md").read_text().count("\n| ") == 4

    monkeypatch.setattr("sys.argv", ["lora.py", "--seq", "8", "--steps", "1"])
    with torch.inference_mode():
        assert lora.beside_peft(model, 2, lora.parse()) > 0
    assert set(dict(model.named_modules())) == names
