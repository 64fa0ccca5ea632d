"""Measures one peer at one budget in its own process: `peer.py SPEC OUT`. Called by stream.py."""

import json
import pathlib
import statistics
import sys
import time

import dit
import peers
import torch
from measure import AnonymousMemory, DeviceMemory, link_rate, timed

WARM_STEPS = 2


def main():
    """Measures and writes one row a length."""
    spec, out = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])
    out.write_text(json.dumps(run(spec)))


def run(spec):
    """Attaches, warms up at the first length, then measures every length asked for."""
    model = dit.build(spec["blocks"])
    link = link_rate()
    lengths = {seq: dit.inputs(seq) for seq in spec["seqs"]}
    torch.cuda.synchronize()
    with AnonymousMemory() as host:
        device = DeviceMemory()
        start = time.perf_counter()
        forward = peers.attach(spec["peer"], model, torch.device("cuda:0"), int(spec["budget"]))
        for _ in range(forward.warmup_calls):
            forward(*lengths[spec["seqs"][0]])
        torch.cuda.synchronize()
        ready = time.perf_counter() - start
        rows = []
        for seq, arguments in lengths.items():
            step = lambda arguments=arguments: forward(*arguments)  # noqa: E731
            times = [timed(step)[1] for _ in range(WARM_STEPS + spec["steps"])][WARM_STEPS:]
            rows.append({"seq": seq, "step_ms": statistics.median(times) * 1e3})
        # Peers allocate through PyTorch: what it uses, activations left out, is what is there between steps.
        used = torch.cuda.memory_allocated() + max(0, device.used())
    for row in rows:
        row |= {"peer": spec["peer"], "budget_bytes": int(spec["budget"]), "ready_s": ready, "vram_bytes": used}
        row |= {"peak_rss_bytes": host.peak, "link_bytes_per_second": link, "host_us_per_visit": None}
        row["info"] = {key: value for key, value in forward.info.items() if isinstance(value, (int, float, str, bool))}
    return rows


if __name__ == "__main__":
    main()
