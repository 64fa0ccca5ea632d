"""The bench's parts that need no GPU: quartiles, what must hold, the tables."""

import json
import mmap

import measure
import pytest
import stream
import table
from peers import PEERS

OWN = {
    "peer": "weightstream",
    "budget_bytes": 2_200_000_000,
    "seq": 256,
    "step_ms": 270.0,
    "resident_ms": 100.0,
    "ideal_ms": 265.0,
    "ratio_to_ideal": 1.02,
    "ratio_to_ideal_quartiles": [1.01, 1.02, 1.03],
    "ratio_to_resident": 2.7,
    "ready_s": 2.5,
    "peak_rss_bytes": 17_000_000_000,
    "vram_bytes": 2_300_000_000,
    "peak_weight_bytes": 2_200_000_000,
    "host_us_per_visit": 8.0,
    "host_us_per_visit_beside_waiting": 8.0,
    "identical": True,
}
FACTS = {"model_bytes": 16_900_000_000, "link_bytes_per_second": 55e9}


def missed(**changes):
    lines = stream.must_hold([OWN | changes], FACTS["model_bytes"])
    return [line["what"].split(" at ")[0] for line in lines if not line["holds"]]


def test_what_must_hold_is_checked_line_by_line():
    assert missed() == []
    assert missed(ratio_to_ideal=1.06) == ["step beside ideal"]
    assert missed(seq=16384, ratio_to_resident=1.02) == ["step beside resident"]
    assert missed(seq=16384, ratio_to_resident=1.0, ratio_to_ideal=1.2) == []
    assert missed(ready_s=3.1) == ["seconds until ready"]
    assert missed(peak_weight_bytes=2_200_000_001) == ["weight pages beside the budget"]
    assert missed(identical=False) == ["outputs that differ"]
    assert missed(host_us_per_visit=11) == ["microseconds of host time a visit"]
    assert missed(host_us_per_visit_beside_waiting=11) == ["the same beside a resident step that waits for copies too"]
    assert missed(peak_rss_bytes=18_000_000_000) == ["peak anonymous memory beside the model"]


def test_a_peer_is_compared_with_the_same_budget_and_length():
    row = {
        "peer": "flextensor",
        "budget_bytes": 2_200_000_000,
        "seq": 256,
        "step_ms": 295.0,
        "link_bytes_per_second": 55e9,
    }
    compared = stream.compared(row, [OWN], FACTS)
    assert compared["ideal_ms"] == pytest.approx(267.3, abs=0.1)
    assert compared["ratio_to_resident"] == pytest.approx(2.95)


def test_tables_show_every_row_and_what_was_missed():
    peer = {
        "peer": "flextensor",
        "budget_bytes": 2_200_000_000,
        "seq": 256,
        "step_ms": 295.0,
        "resident_ms": 100.0,
        "ideal_ms": 265.0,
        "ratio_to_ideal": 1.11,
        "ratio_to_resident": 2.95,
        "ready_s": 35.9,
        "peak_rss_bytes": 26_700_000_000,
        "vram_bytes": 2_300_000_000,
        "host_us_per_visit": None,
    }
    result = FACTS | {
        "device": "a GPU",
        "driver": "580",
        "commit": "abc",
        "versions": {"torch": "2.11.0"},
        "rows": [OWN, peer],
        "skipped": [{"peer": "mmgp", "budget_bytes": 1, "seqs": [256], "why": "the time limit was reached"}],
        "must_hold": stream.must_hold([OWN | {"ready_s": 4.0}], FACTS["model_bytes"]),
    }
    text = stream.describe(json.loads(json.dumps(result)))
    assert "flextensor" in text and "MISSED: seconds until ready" in text and "not measured: mmgp" in text
    page = table.page(result, "stream.json")
    assert page.count("\n| ") == 3 and "1.020 [1.010, 1.030]" in page and "Missed so far" in page


def test_quartiles_of_few_values():
    assert measure.quartiles([3.0]) == [3.0, 3.0, 3.0]
    assert measure.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 3.0, 4.0]


def test_anonymous_memory_sees_what_is_taken():
    before = measure.resident_anonymous()
    # A mapping of its own: what is taken from the heap may be memory that an earlier test has left there.
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.write(bytes(len(held)))
        with measure.AnonymousMemory() as memory:
            pass
        assert memory.peak > before + len(held) // 2


def test_every_peer_has_its_list_of_packages():
    with open(stream.HERE / "peers" / "wheels.json") as file:
        lists = json.load(file)
    for name in PEERS:
        known = name in lists or name.rpartition("_")[0] in lists
        assert known, name
