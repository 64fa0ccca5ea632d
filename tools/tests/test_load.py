"""The bench of loading: its judgement and its page, and a run of a few megabytes where the reader is built."""

import json

import load
import pytest

ROW = {
    "bytes": 1_000_000_000,
    "touched_s": 0.4,
    "copied_s": 1.0,
    "warm_s": 0.4,
    "raw_s": 0.9,
    "cold_s": 1.0,
    "cold_buffered_s": 2.0,
    "cold_direct_s": 1.0,
    "cold_uring_s": 1.1,
    "warm_ratio": 2.5,
    "cold_ratio": 0.9,
}


def test_what_must_hold_goes_by_medians():
    rows = [ROW, ROW | {"warm_ratio": 1.0}, ROW | {"cold_ratio": 0.1}]
    judged = load.judge(rows)
    assert [line["holds"] for line in judged["must_hold"]] == [True, True]
    assert judged["medians"]["warm_s"] == 0.4
    missed = load.judge([ROW | {"warm_ratio": 1.9, "cold_ratio": 0.79}])["must_hold"]
    assert not any(line["holds"] for line in missed)


def test_the_page_says_what_was_measured_and_missed():
    result = {
        "commit": "abc",
        "cpu": "a processor",
        "cores": 2,
        "kernel": "6.0",
        "load_average": 1.0,
        "versions": {"torch": "2.0"},
        "file_bytes": 1_000_000_000,
        "rounds": [ROW],
        "choices": {"warm": {"mode": "buffered", "why": "it is warm"}},
    }
    text = load.page(result | load.judge([ROW | {"warm_ratio": 1.0}]), "load.json")
    assert "| in the page cache | ours, every byte copied | 0.400 | 2.50 |" in text
    assert "buffered, because it is warm" in text
    assert "1.00, at least 2.0: missed" in text and "0.90, at least 0.8: holds" in text


def test_a_reader_that_ends_is_an_error():
    reader = load.Reader("false", "file")
    with pytest.raises((RuntimeError, BrokenPipeError)):
        reader.ask("warm")
        reader.ask("warm")
    assert json.dumps(load.MUST_HOLD)
