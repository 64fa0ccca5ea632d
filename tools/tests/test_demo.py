"""The demo's parts that need no model: budgets, comparing, printing, aligned weights, kept weights."""

import copy

import demo
import memory
import models
import pytest
import torch
from budgets import parse_budget


@pytest.mark.parametrize(
    ("text", "expected"),
    [("67108864", 67108864), ("64MiB", 64 << 20), ("1.5 GiB", 3 << 29), ("25%w", 250), ("12.5%w", 125), ("2KB", 2000)],
)
def test_budgets_are_read(text, expected):
    assert parse_budget(text, 1000) == expected


@pytest.mark.parametrize("text", ["", "0", "-5", "25%", "lots", "64 Mib", "1e9", "nan", "0%w"])
def test_budgets_that_cannot_be_read_are_named(text):
    with pytest.raises(ValueError, match="the budget"):
        parse_budget(text, 1000)


SPEC = {"device": "host", "threads": 1, "budget_bytes": 250}
PREPARED = {"name": "a model", "step": "token", "weights_bytes": 1000}
RESIDENT = {"outputs": {"tokens": [1, 2], "logits": ["a", "b"]}, "seconds_per_step": 0.5}
STREAMED = {
    "outputs": {"tokens": [1, 2], "logits": ["a", "b"]},
    "seconds_per_step": 0.75,
    "tokens": 2,
    "text": "hello",
    "peak_weight_bytes": 250,
    "streamed_bytes_per_step": 900,
    "link_bytes_per_second": 1500.0,
    "attach_seconds": 0.1,
    "device_name": "emulated",
    "versions": {},
}


def test_the_result_has_what_the_readme_promises():
    outcome = demo.compare(SPEC, "25%w", PREPARED, RESIDENT, STREAMED)
    for key in (
        "device",
        "model",
        "weights_bytes",
        "budget_bytes",
        "peak_weight_bytes",
        "identical",
        "tokens",
        "streamed_bytes_per_step",
    ):
        assert key in outcome
    assert outcome["identical"] is True
    assert outcome["seconds_per_step"]["floor"] == pytest.approx(0.6)
    text = demo.describe(outcome)
    assert "identical to the resident run" in text and "within the budget" in text


def test_one_different_bit_is_seen():
    streamed = copy.deepcopy(STREAMED)
    streamed["outputs"]["logits"][1] = "c"
    outcome = demo.compare(SPEC, "25%w", PREPARED, RESIDENT, streamed)
    assert outcome["identical"] is False and "DIFFERENT" in demo.describe(outcome)
    over = demo.compare(SPEC, "25%w", PREPARED, RESIDENT, STREAMED | {"peak_weight_bytes": 251})
    assert "OVER" in demo.describe(over)


def test_auto_prefers_cuda_and_falls_back():
    assert demo.devices("auto", cuda=True) == ["cuda:0", "host"]
    assert demo.devices("auto", cuda=False) == ["host"]
    assert demo.devices("cuda:1", cuda=True) == ["cuda:1"]
    with pytest.raises(demo.Failed, match="--device host"):
        demo.devices("cuda:1", cuda=False)


def test_weights_are_aligned_and_stay_tied():
    model = torch.nn.ModuleList([torch.nn.Linear(5, 7, bias=False), torch.nn.Linear(5, 7, bias=False)])
    model[1].weight = model[0].weight
    room = torch.zeros(40, dtype=torch.float32)
    model[0].weight.data = room[1:36].view(7, 5)
    values = model[0].weight.detach().clone()
    assert memory.weight_bytes(model) == 140
    memory.align_weights(model)
    assert model[0].weight.data_ptr() % 512 == 0 and model[0].weight.data_ptr() == model[1].weight.data_ptr()
    assert torch.equal(model[0].weight, values)


def test_kept_weights_are_used_only_if_every_byte_is_as_it_was_written(tmp_path, monkeypatch):
    made = []

    def convert(self, source, folder):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "config.json").write_text("{}")
        made.append(folder)

    monkeypatch.setattr(models, "package_file", lambda package, suffix: tmp_path / "file.gguf")
    monkeypatch.setattr(models, "check_sha256", lambda path, expected: None)
    monkeypatch.setattr(models.SmolLm2, "_convert", convert)
    model = models.SmolLm2()
    folder = model.prepare(tmp_path / "cache")
    assert model.prepare(tmp_path / "cache") == folder and len(made) == 1
    for spoil in (
        lambda: (folder / "model.safetensors").write_bytes(b"Weights"),
        lambda: (folder / "config.json").unlink(),
        lambda: (folder / "more.json").write_text("{}"),
        lambda: (folder / models.SUMS).unlink(),
        lambda: (folder / models.SUMS).write_text(""),
    ):
        before = len(made)
        spoil()
        assert model.prepare(tmp_path / "cache") == folder and len(made) == before + 1
        assert (folder / "model.safetensors").read_bytes() == b"weights"
        assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]


@pytest.mark.parametrize(
    "arguments", [["--device", "tpu"], ["--device", "host:1"], ["--device", "cuda:x"], ["--tokens", "0"]]
)
def test_what_the_command_line_cannot_mean_is_refused_before_anything_runs(arguments, monkeypatch, capsys):
    monkeypatch.setattr(demo.sys, "argv", ["demo.py", "--cache", "unused", *arguments])
    with pytest.raises(SystemExit) as ended:
        demo.parse()
    assert ended.value.code == 2
    assert arguments[1] in capsys.readouterr().err


@pytest.mark.parametrize("text", ["25%", "lots", "0%w", "64 Mib"])
def test_a_budget_that_cannot_be_read_is_refused_before_the_model_is_prepared(text, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["demo.py", "--budget", text])
    monkeypatch.setattr(demo, "step", lambda *_: pytest.fail("a step was begun"))
    assert demo.main() == 1
    assert "the budget" in capsys.readouterr().err
