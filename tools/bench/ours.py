"""Measures weightstream beside resident weights in one process: `ours.py SPEC OUT`. Called by stream.py."""

import json
import pathlib
import statistics
import sys
import tempfile
import time

import dit
import place
import torch
import weightstream
import torch_events
from measure import PIECE, AnonymousMemory, DeviceMemory, link_rate, pairs, quartiles, timed

# The host's time a unit visit is independent of the size of the weights; measured on a small model read from a file,
# whose bytes therefore lie in a slab.
SMALL = {"dim": 1280, "feed": 3456, "heads": 10}
SMALL_BUDGET = 0.2
WARM_STEPS = 3
HOST_STEPS = 50


def main():
    """Measures and writes the result."""
    spec, out = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])
    with torch.inference_mode():
        out.write_text(json.dumps(run(spec)))


def run(spec):
    """All budgets and lengths, one model after the other on the same weights."""
    say("building the model")
    model = dit.build(spec["blocks"])
    total = dit.weight_bytes(model)
    rows, link = [], link_rate()
    say(f"link {link / 1e9:.1f} GB/s")
    twin = dit.on_gpu(model)
    for budget in spec["budgets"]:
        rows += at_budget(spec, model, twin, int(budget), total, link)
    host = host_time(spec)
    for row in rows:
        row |= {key: host[key] for key in host if key.startswith("host_us_per_visit")}
    properties = torch.cuda.get_device_properties(0)
    return {
        "rows": rows,
        "model_bytes": total,
        "link_bytes_per_second": link,
        "host": host,
        "device": properties.name,
        "device_bytes": properties.total_memory,
        "versions": {"weightstream": weightstream.__version__, "torch": torch.__version__, "cuda": torch.version.cuda},
    }


def at_budget(spec, model, twin, budget, total, link):
    """One row a length."""
    with AnonymousMemory() as host:
        device = DeviceMemory()
        first = dit.inputs(spec["seqs"][0])
        torch.cuda.synchronize()
        start = time.perf_counter()
        attachment = weightstream.attach(model, device=place.WEIGHTS, budget=budget)
        output = model(*first)
        torch.cuda.synchronize()
        ready = time.perf_counter() - start
        say(f"budget {budget / 1e9:.1f} GB: ready after {ready:.2f} s")
        rows, identical = [], torch.equal(output, twin(*first))
        del output
        for seq in spec["seqs"]:
            rows.append(at_length(spec, attachment, model, twin, seq, budget, total, link))
        used = device.used()
        report = attachment.report()
        attachment.detach()
    for row in rows:
        row["identical"] = row["identical"] and identical
        row |= {"ready_s": ready, "peak_rss_bytes": host.peak, "vram_bytes": used}
        row["peak_weight_bytes"] = report["engine"]["page_bytes_peak"]
    rows[0]["report"] = {key: report[key] for key in ("notes", "host", "reason") if key in report}
    return rows


def at_length(spec, attachment, model, twin, seq, budget, total, link):
    """Our step and the resident step in turn."""
    arguments = dit.inputs(seq)
    step, resident = lambda: model(*arguments), lambda: twin(*arguments)
    for _ in range(WARM_STEPS):
        mine, theirs = step(), resident()
    identical = torch.equal(mine, theirs)
    del mine, theirs
    before = attachment.stats()
    found = pairs(step, resident, spec["pairs"])
    steps = 2 * spec["pairs"]
    visits = (attachment.stats()["visits"] - before["visits"]) / steps
    streamed = (attachment.stats()["copied_bytes"] - before["copied_bytes"]) / steps
    compute = statistics.median(theirs for _, (_, theirs) in found)
    ideal = max(compute, max(0, total - budget) / link)
    step_time = statistics.median(mine for (_, mine), _ in found)
    to_ideal = quartiles([mine / ideal for (_, mine), _ in found])
    to_resident = quartiles([mine / theirs for (_, mine), (_, theirs) in found])
    in_place = [(mine - theirs) / visits for (mine, _), (theirs, _) in found] if visits else [0.0]
    say(f"  S={seq}: {step_time * 1e3:.1f} ms, {to_ideal[1]:.3f} of ideal, {to_resident[1]:.3f} of resident")
    return {
        "peer": "weightstream",
        "budget_bytes": budget,
        "seq": seq,
        "pairs": len(found),
        "identical": identical,
        "step_ms": step_time * 1e3,
        "resident_ms": compute * 1e3,
        "ideal_ms": ideal * 1e3,
        "ratio_to_ideal": to_ideal[1],
        "ratio_to_ideal_quartiles": to_ideal,
        "ratio_to_resident": to_resident[1],
        "ratio_to_resident_quartiles": to_resident,
        "unit_visits": visits,
        "streamed_bytes_per_step": streamed,
        "host_us_per_visit_in_place": statistics.median(in_place) * 1e6,
    }


def host_time(spec):
    """Microseconds of host time a unit visit adds to submitting a step, from a slab.

    Compared with a resident step submitted to an idle device, and with one submitted behind an event that comes late.
    The second is the fair one: a streamed step always waits for copies, and submitting kernels to a waiting stream is
    slower than to a running one (10.5 and 14.9 ms for one and the same resident step of this model), whoever does it.
    Beside both, a resident step with as many waits, records and copies by PyTorch's events: what a visit costs at least.
    """
    import safetensors.torch

    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "small.safetensors")
        model = dit.build(spec["blocks"], SMALL)
        safetensors.torch.save_file(model.state_dict(), file)
        model.load_state_dict(safetensors.torch.load_file(file), assign=True)
        model.requires_grad_(False)
        twin = dit.on_gpu(model)
        attachment = weightstream.attach(
            model, device=place.WEIGHTS, budget=int(dit.weight_bytes(model) * SMALL_BUDGET)
        )
        arguments = dit.inputs(256, SMALL)
        step, resident = lambda: model(*arguments), lambda: twin(*arguments)
        late = LateEvent()
        for _ in range(WARM_STEPS):
            step(), resident()
        before = attachment.stats()
        step()
        after = attachment.stats()
        events = dit.on_gpu(twin)
        turns = torch_events.add(
            events, after["visits"] - before["visits"], after["copied_bytes"] - before["copied_bytes"]
        )
        by_torch = lambda: events(*arguments)
        for _ in range(WARM_STEPS):
            by_torch()
        before = attachment.stats()
        count = max(HOST_STEPS, spec["pairs"])
        found = []
        for _ in range(count):
            found.append((timed(step)[0], timed(resident)[0], timed(resident, late.wait)[0], timed(by_torch)[0]))
        after = attachment.stats()
        visits = (after["visits"] - before["visits"]) / count
        native = (after["host_nanoseconds"] - before["host_nanoseconds"]) / count / 1e3
        attachment.detach()
    if not visits:
        raise RuntimeError("the small model did not stream")
    result = {
        "host_visits": visits,
        "host_us_per_visit": added(found, 0, 1) / visits * 1e6,
        "host_us_per_visit_beside_waiting": added(found, 0, 2) / visits * 1e6,
        "host_us_per_visit_by_torch": added(found, 3, 1) / turns * 1e6,
        "native_us_per_visit": native / visits,
        "submit_us": [statistics.median(times) * 1e6 for times in zip(*found, strict=True)],
    }
    say(
        f"host time a unit visit: {result['host_us_per_visit']:.1f} us, beside a resident step that waits too "
        f"{result['host_us_per_visit_beside_waiting']:.1f} us, native {result['native_us_per_visit']:.1f} us; "
        f"{visits:.0f} visits a step; the same waits, records and copies by PyTorch alone "
        f"{result['host_us_per_visit_by_torch']:.1f} us"
    )
    return result


def added(found, step, beside):
    """Seconds that submitting one step of each round takes more than another."""
    return statistics.median(times[step] - times[beside] for times in found)


class LateEvent:
    """An event on a stream of copies that is reached only after a step was submitted."""

    def __init__(self, pieces=32):
        self._stream = torch.cuda.Stream()
        self._source = place.page_locked(PIECE)
        self._target = torch.empty(PIECE, dtype=torch.uint8, device=place.TENSORS)
        self._pieces = pieces

    def wait(self):
        """Makes the current stream wait for about 40 ms of copies."""
        with torch.cuda.stream(self._stream):
            for _ in range(self._pieces):
                self._target.copy_(self._source, non_blocking=True)
            event = self._stream.record_event()
        torch.cuda.current_stream().wait_event(event)


def say(text):
    """Progress."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
