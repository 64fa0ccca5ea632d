"""Startup timings on a GPU: synchronizing, device memory, and a step on the device's clock."""

from __future__ import annotations

import pytest
import torch
from attach_models import MlpBlock, Towered, weight_bytes
from startup_reports import by_name

import weightstream
from weightstream import startup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use"),
]

MIB = 1 << 20


def test_a_synchronized_phase_holds_what_the_device_computes() -> None:
    torch.cuda.init()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with startup.collect_startup_timings(startup.synchronize_cuda) as timings:
        with startup.phase("compute"):
            start.record()
            torch.cuda._sleep(200_000_000)
            end.record()
    (phase,) = timings.to_dict()["phases"]
    computed = start.elapsed_time(end) / 1e3
    assert phase["duration"] >= 0.99 * computed > 0
    # Nearly all of it was waited for in the callback, at the end.
    assert phase["sync_inside"] > 0.5 * computed


def test_the_context_is_made_in_the_phase_that_makes_it_and_memory_is_told() -> None:
    torch.cuda.init()
    torch.cuda.empty_cache()
    with startup.collect_startup_timings() as timings:
        with startup.phase("allocate"):
            kept = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
        with startup.phase("free"):
            del kept
    report = timings.to_dict()
    found = by_name(report)
    before, after = found["allocate"]["levels"]["device.allocated"]
    assert after - before == 64 * MIB
    before, after = found["free"]["levels"]["device.allocated"]
    assert before - after == 64 * MIB
    assert found["allocate"]["levels"]["device.free"][1] > 0
    assert report["environment"]["gpus"][0]["memory_bytes"] > 0 and report["environment"]["nvidia_driver"]


def test_attaching_and_a_traced_step() -> None:
    torch.manual_seed(0)
    model = Towered([MlpBlock(1024) for _ in range(8)], 1024).to(torch.bfloat16).eval().requires_grad_(False)
    x = torch.randn(1, 64, 8).to(torch.bfloat16).cuda()
    with startup.collect_startup_timings(startup.synchronize_cuda) as timings:
        attachment = weightstream.attach(model, device="cuda", budget=int(weight_bytes(model) * 0.5))
    names = [phase["name"] for phase in timings.to_dict()["phases"]]
    assert names[0] == "attach" and "attach.upload" in names
    with torch.inference_mode():
        for _ in range(3):
            model(x)
        attachment.trace_next_step()
        trace = None
        for _ in range(4):
            model(x)
            trace = trace or attachment.step_trace()
    assert trace is not None
    report = trace.to_dict()
    visits = [
        phase for phase in report["phases"][1:] if phase["name"] != "wait" and not phase["name"].startswith("copy ")
    ]
    assert len(visits) >= 8
    starts = [phase["start_offset"] for phase in visits]
    assert starts == sorted(starts)
    for copy in (phase for phase in report["phases"] if phase["name"].startswith("copy ")):
        # No link is faster than 500 GB/s.
        assert copy["duration"] > copy["counters"]["bytes"] / 500e9
    attachment.detach()
