"""The measuring of the benches `pipeline`, `quantized` and `calibrate`, with the CPU and the emulator in place of a GPU, and their pages."""

import json

import calibrate
import dit
import pipeline
import place
import quantized
import torch
import weightstream

SIZES = {
    "encoder": {"blocks": 4, "dim": 64, "feed": 160, "heads": 4},
    "transformer": {"blocks": 16, "dim": 64, "feed": 160, "heads": 4},
    "vae": {"blocks": 3, "channels": 32},
    "text": 6,
    "side": 8,
}


def arguments(monkeypatch, module, *given):
    monkeypatch.setattr("sys.argv", [module.__name__, *map(str, given)])
    return module.parse()


def test_a_pipeline_is_measured_from_end_to_end(no_gpu, monkeypatch):
    options = arguments(monkeypatch, pipeline, "--budget-mb", 1, "--seqs", "8,40", "--steps", 2, "--generations", 6)
    with torch.inference_mode():
        result = pipeline.run(options, SIZES)
    assert [row["identical"] for row in result["steps"]] == [True, True]
    total = result["model_bytes"]["transformer"]
    assert all(0 < row["streamed_bytes_per_step"] < total for row in result["steps"])
    assert [row["model"] for row in result["switches"]] == ["text_encoder", "transformer", "vae"]
    assert all(row["bytes"] > 0 for row in result["switches"])
    assert result["generations"]["differ"] == 0 and result["page_bytes_peak"] <= result["budget_bytes"]
    first, last = result["generations"]["first"], result["generations"]["last"]
    assert (first["files"], first["threads"], first["locked_bytes"]) == (
        last["files"],
        last["threads"],
        last["locked_bytes"],
    )
    lines = pipeline.must_hold(result)
    assert all(line["holds"] for line in lines if "differ" in line["what"] or "budget" in line["what"])
    text = pipeline.page(
        result | {"must_hold": lines, "commit": "abc", "device": "none", "torch": "2"}, "pipeline.json"
    )
    assert "text_encoder" in text and text.count("\n|") == 2 + len(lines)


def test_limits_of_a_pipeline_are_told_from_values():
    grown = {"anonymous_bytes": 0, "device_bytes": 0, "locked_bytes": 0, "files": 3, "threads": 1}
    result = {
        "steps": [{"seq": 256, "ratio_to_ideal": 1.2, "identical": False}],
        "switches": [
            {"model": "vae", "bytes": 1, "seconds": 0.131, "transfer_seconds": 0.1},
            {"model": "encoder", "bytes": 1, "seconds": 0.129, "transfer_seconds": 0.1},
        ],
        "generations": {"count": 50, "differ": 0, "first": grown, "last": grown | {"files": 4}},
        "page_bytes_peak": 1,
        "budget_bytes": 1,
    }
    missed = [line["what"] for line in pipeline.must_hold(result) if not line["holds"]]
    assert missed == [
        "step of the transformer beside ideal at S=256",
        "outputs that differ at S=256",
        "seconds to bring vae, 0.00 GB",
        "files more after them",
    ]


def test_int8_is_measured_beside_bfloat16(no_gpu, monkeypatch):
    total = dit.weight_bytes(dit.build(6))
    options = arguments(monkeypatch, quantized, "--blocks", 6, "--budget", total // 3, "--seqs", "4,16", "--steps", 2)
    with torch.inference_mode():
        result = quantized.run(options)
    plain, packed = result["bfloat16"], result["int8"]
    assert 0.5 < packed["model_bytes"] / plain["model_bytes"] < 0.55
    for rows in (plain["rows"], packed["rows"]):
        assert [row["seq"] for row in rows] == [4, 16] and all(row["identical"] for row in rows)
    assert packed["rows"][0]["streamed_bytes_per_step"] < 0.5 * plain["rows"][0]["streamed_bytes_per_step"]
    lines = quantized.must_hold(result)
    assert [line["limit"] for line in lines] == [0.55, 0, 0.55, 0]
    text = quantized.page(
        result | {"must_hold": lines, "commit": "abc", "device": "none", "torch": "2"}, "quantized.json"
    )
    assert text.count("| int8 |") == 2


def test_a_calibration_is_compared_with_bisection(no_gpu, monkeypatch):
    model = dit.weight_bytes(dit.build(6))
    device = weightstream.HostDevice(bytes=model // 2 // 4096 * 4096, granularity=4096)
    monkeypatch.setattr(place, "WEIGHTS", device)
    monkeypatch.setattr(calibrate, "SMALL", 0)
    headroom = 50_000 / (1 << 30)
    options = arguments(monkeypatch, calibrate, "--blocks", 6, "--seq", 8, "--headroom", headroom, "--rounds", 24)
    with torch.inference_mode():
        result = calibrate.run(options)
    assert result["applied"] and 0 < result["recommended_gb"] < result["bisected_gb"]
    assert {line["ran"] for line in result["tries"]} == {True, False}
    lines = calibrate.must_hold(result)
    assert all(line["holds"] for line in lines), lines
    assert "of residents are recommended" in calibrate.page(
        result | {"must_hold": lines, "commit": "abc", "device": "none", "torch": "2"}, "x.json"
    )


def test_a_bench_of_one_process_from_its_command_line(no_gpu, monkeypatch, tmp_path, capsys):
    total = dit.weight_bytes(dit.build(6))
    out, page = tmp_path / "deep" / "quantized.json", tmp_path / "page.md"
    command = ["quantized.py", "--blocks", "6", "--budget", str(total // 3), "--seqs", "4", "--steps", "2"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", [*command, "--out", str(out)])
    assert quantized.main() == 3 and not out.exists()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "none")
    monkeypatch.setattr(quantized, "STEP_LIMIT", 0.0)
    assert quantized.main() == 0
    result = json.loads(out.read_text())
    assert result["bench"] == "quantized" and [line["holds"] for line in result["must_hold"]] == [False, True]
    assert "limit 0.0, missed" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*command, "--out", str(out), "--check"])
    assert quantized.main() == 1
    monkeypatch.setattr("sys.argv", ["quantized.py", "--page", str(out), "--out", str(page)])
    assert quantized.main() == 0 and page.read_text() == quantized.page(json.loads(out.read_text()), out.name)
