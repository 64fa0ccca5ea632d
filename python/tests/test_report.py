"""Reports are dictionaries that print as a summary; an attachment that is not kept stays with its model."""

from __future__ import annotations

import gc
import json
import weakref

from attach_models import attached, host, inputs, mlp, run, same_bits

import weightstream


def test_a_report_prints_the_main_numbers() -> None:
    model = mlp(10)
    with attached(model, 0.5) as attachment:
        for _ in range(2):
            run(model, inputs())
        report = attachment.report()
        engine = report["engine"]
        assert report["resident_bytes"] == engine["own_pages"] * engine["page_bytes"] > 0
        assert json.loads(json.dumps(report)) == report
        text = str(report)
    for label in ("device", "weights", "budget", "resident", "ring", "streamed", "host memory", "so far"):
        assert f"\n{label} " in f"\n{text}", label
    assert f"{report['resident_bytes'] / 1024:.2f} KiB" in text and "2 steps" in text and "asked for the host" in text
    assert len(text.splitlines()) < 12 and "{" not in text


def test_notes_are_printed_too() -> None:
    model = mlp()
    view = model.blocks[1].up.weight[:2]
    with attached(model, 0.5) as attachment:
        report = attachment.report()
        assert report["notes"] and all(f"note         {note}" in str(report) for note in report["notes"])
    del view


def test_the_last_report_prints_after_detaching() -> None:
    model = mlp()
    with attached(model, 0.5) as attachment:
        run(model, inputs())
    assert "weights" in str(attachment.report()) and attachment.report()["engine"]["stats"]["steps"] == 1


def test_an_attachment_that_is_not_kept_stays_with_its_model() -> None:
    model = mlp()
    expected = run(model, inputs())
    weightstream.attach(model, device=host(), budget="300KiB")
    gc.collect()
    for _ in range(3):
        assert same_bits(run(model, inputs()), expected)
    attachment = weakref.ref(model._weightstream)
    assert attachment().attached and attachment().model is model
    model._weightstream.detach()
    gc.collect()
    assert attachment() is None and not hasattr(model, "_weightstream")
    assert same_bits(run(model, inputs()), expected)
