"""One measuring process of the bench `ready`: `ready_task.py TASK FILE SPEC`; prints one JSON object."""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import statistics
import sys
import time

import dit
import place
import torch
import weightstream
from measure import AnonymousMemory, quartiles, resident_anonymous, timed
from weightstream import offload

CHUNK = 16 << 20
ROUNDS = 9


def main():
    """Does the task, then waits until its input ends: memory is looked at from outside meanwhile."""
    task, file, spec = sys.argv[1], pathlib.Path(sys.argv[2]), json.loads(sys.argv[3])
    with torch.inference_mode():
        found = TASKS[task](file, spec)
        print(json.dumps(found), flush=True)
        sys.stdin.read()


def write(file, spec):
    """The model's file, left in the page cache."""
    model = dit.build(spec["blocks"])
    offload.save_model(model, str(file))
    return {"file_bytes": file.stat().st_size, "model_bytes": dit.weight_bytes(model)}


def empty(blocks):
    """The model without weights."""
    with torch.device("meta"):
        return dit.DiT(blocks, **dit.SIZE).to(torch.bfloat16).eval()


def ready(file, spec):
    """Seconds from the call until the first step has run. What CUDA itself takes to start comes before."""
    torch.zeros(1, device=place.TENSORS)
    model, inputs = empty(spec["blocks"]), dit.inputs(spec["seq"])
    torch.nn.functional.linear(
        inputs[0], torch.zeros(8, inputs[0].shape[-1], device=place.TENSORS, dtype=torch.bfloat16)
    )
    torch.cuda.synchronize()
    before = resident_anonymous()
    with AnonymousMemory() as watched:
        start = time.perf_counter()
        offload.load_model_data(model, str(file), writable_tensors=False, default_dtype=None)
        loaded = time.perf_counter()
        attachment = weightstream.attach(model, device=place.WEIGHTS, budget=spec["budget"])
        attached = time.perf_counter()
        output = model(*inputs)
        torch.cuda.synchronize()
        end = time.perf_counter()
    report = attachment.report()
    return {
        "ready_s": end - start,
        "load_s": loaded - start,
        "attach_s": attached - loaded,
        "first_step_s": end - attached,
        "anonymous_added": watched.peak - before,
        "host": report["host"],
        "digest": hashlib.sha256(output.cpu().view(torch.uint8).numpy().tobytes()).hexdigest(),
    }


def staged(file, spec):
    """The same steps with weights locked where they are, and with nothing locked but the ring."""
    rows, outputs = [], {}
    times = {}
    for pinned in (True, False):
        model = empty(spec["blocks"])
        offload.load_model_data(model, str(file), writable_tensors=False, default_dtype=None)
        with weightstream.attach(
            model, device=place.WEIGHTS, budget=spec["budget"], pinned_memory=pinned
        ) as attachment:
            for seq in spec["seqs"]:
                inputs = dit.inputs(seq)
                for _ in range(3):
                    output = model(*inputs)
                outputs.setdefault(seq, []).append(output)
                times[pinned, seq] = [timed(lambda: model(*inputs))[1] for _ in range(ROUNDS)]
            report = attachment.report()
            if not pinned:
                host, streamed = report["host"], report["streamed_bytes_per_step"]
    for seq in spec["seqs"]:
        locked, through = (statistics.median(times[pinned, seq]) for pinned in (True, False))
        rows.append(
            {
                "seq": seq,
                "locked_ms": [t * 1e3 for t in quartiles(times[True, seq])],
                "staged_ms": [t * 1e3 for t in quartiles(times[False, seq])],
                "staged_of_locked": through / locked,
                "staged_bytes_per_second": streamed / through,
                "identical": torch.equal(*outputs[seq]),
            }
        )
    return {"rows": rows, "host": host, "copy_bytes_per_second": copy_rate(file)}


def copy_rate(file, threads=8, most=6 << 30):
    """The rate at which as many threads copy the file's bytes from the page cache to page-locked memory."""
    size = min(most, file.stat().st_size) // CHUNK * CHUNK
    target = memoryview(place.page_locked(threads * CHUNK).numpy())
    descriptor = os.open(file, os.O_RDONLY)

    def read(number):
        slot = number % threads
        os.preadv(descriptor, [target[slot * CHUNK : (slot + 1) * CHUNK]], number * CHUNK)

    rates = []
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(4):
            start = time.perf_counter()
            list(pool.map(read, range(size // CHUNK)))
            rates.append(size / (time.perf_counter() - start))
    os.close(descriptor)
    return statistics.median(rates[1:])


def pin(_, spec):
    """Seconds that PyTorch takes to lock as many bytes."""
    torch.zeros(1, device=place.TENSORS)
    torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    start = time.perf_counter()
    kept = torch.empty(spec["bytes"], dtype=torch.uint8, pin_memory=True)
    seconds = time.perf_counter() - start
    del kept
    return {"seconds": seconds}


TASKS = {"write": write, "ready": ready, "staged": staged, "pin": pin}

if __name__ == "__main__":
    main()
