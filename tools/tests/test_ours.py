"""The measuring of the bench `stream` from end to end, with the CPU and the emulator in place of a GPU."""

import collections
import contextlib
import json
import sys

import dit
import ours
import pytest
import stream
import table
import torch
import torch_events

BLOCKS = 6
COUNTS = collections.Counter()


class Stream:
    """A stream on which everything has happened already."""

    def wait_event(self, event):
        COUNTS["waits"] += 1

    def record_event(self):
        return object()


class Event:
    """An event that has been reached."""

    def record(self, stream):
        COUNTS["records"] += 1


@pytest.fixture
def small(no_gpu, monkeypatch):
    """Streams and events that record what is asked of them, and a second model that is small, too."""
    faked = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
    }
    for name, value in faked.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(ours, "PIECE", 1 << 10)
    monkeypatch.setattr(ours, "SMALL_BUDGET", 0.5)
    monkeypatch.setattr(ours, "HOST_STEPS", 2)
    monkeypatch.setattr(ours, "SMALL", {"dim": 64, "feed": 160, "heads": 4})


def test_the_whole_measurement(small, monkeypatch, tmp_path):
    total = dit.weight_bytes(dit.build(BLOCKS))
    budgets = [int(total * 0.5), int(total * 0.8)]
    spec = {"blocks": BLOCKS, "budgets": budgets, "seqs": [4, 8], "pairs": 2}
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["ours.py", json.dumps(spec), str(out)])
    ours.main()
    result = json.loads(out.read_text())
    assert [(row["budget_bytes"], row["seq"]) for row in result["rows"]] == [(b, s) for b in budgets for s in (4, 8)]
    for row in result["rows"]:
        assert row["identical"] and row["peak_weight_bytes"] <= row["budget_bytes"]
        assert row["unit_visits"] >= BLOCKS and 0 < row["streamed_bytes_per_step"] < total
    assert result["host"]["host_visits"] >= BLOCKS and result["model_bytes"] == total
    assert all(
        row["host_us_per_visit_by_torch"] == result["host"]["host_us_per_visit_by_torch"] for row in result["rows"]
    )
    # What is made of it: the lines that must hold, and both tables.
    result |= {"commit": "abc", "driver": "none", "skipped": []}
    result["must_hold"] = stream.must_hold(result["rows"], total)
    assert all(line["holds"] for line in result["must_hold"] if "differ" in line["what"] or "budget" in line["what"])
    assert "weightstream" in stream.describe(result) and "weightstream" in table.page(result, "stream.json")


def test_the_turns_of_pytorch_alone(small):
    model = dit.build(BLOCKS)
    arguments = dit.inputs(4)
    with torch.inference_mode():
        expected = model(*arguments)
        for visits, parts in ((BLOCKS, 1), (4 * BLOCKS, 4), (100 * BLOCKS, 4)):
            twin = dit.on_gpu(model)
            COUNTS.clear()
            assert torch_events.add(twin, visits, 1000) == parts * BLOCKS
            assert torch.equal(twin(*arguments), expected)
            assert COUNTS == {"waits": 2 * parts * BLOCKS, "records": 2 * parts * BLOCKS}
