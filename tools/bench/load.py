"""The bench of loading on the CPU: our reader beside safetensors' own and beside the bare device, in one run.

`load.py --reader target/release/examples/load --out load.json` measures, `load.py --page load.json --out loading.md`
writes the page. The reader is a process of its own that answers one command a line; it and this process take turns, so
that never two of them are busy.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import time

MUST_HOLD = (
    ("warm: seconds of load_file with every byte copied, beside ours", "warm_ratio", 2.0),
    ("cold: our rate beside the rate of direct reads, 16 at a time", "cold_ratio", 0.8),
)
# What one layer of a language model of middle size holds.
SHAPES = ((4096, 4096), (4096,), (11008, 4096), (4096, 11008), (4096, 4096), (128,))
REPEATS = 3
RAW_BLOCK = 4 << 20
RAW_DEPTH = 16


def main():
    """Measures and writes the result, or makes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reader", help="the reader's program")
    parser.add_argument("--page", type=pathlib.Path, help="make the page of this result instead of measuring")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--size", type=float, default=1.0, help="GiB of the file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--folder", type=pathlib.Path, default=pathlib.Path("target/bench-load"), help="where the file goes"
    )
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    if options.page:
        options.out.write_text(page(json.loads(options.page.read_text()), options.page.name))
        return
    result = measure(options)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(summary(result))


class Reader:
    """The other process."""

    def __init__(self, program, file):
        self.process = subprocess.Popen([program, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *words):
        """Its answer to one command."""
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the reader ended at {words}: exit status {self.process.wait()}")
        return json.loads(line)

    def close(self):
        """Ends it."""
        self.process.stdin.close()
        self.process.wait()


def measure(options):
    """All rounds, and what they come to."""
    import safetensors
    import torch

    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "model.safetensors"
    write(file, int(options.size * 2**30))
    reader = Reader(options.reader, str(file))
    rows = []
    try:
        for number in range(options.rounds + 1):
            row = one_round(reader, file)
            # The first round finds caches, libraries and memory as nobody left them.
            if number:
                rows.append(row)
    finally:
        reader.close()
        file.unlink()
    result = {
        "bench": "load",
        "commit": options.commit,
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load_average": os.getloadavg()[0],
        "versions": {
            "torch": torch.__version__,
            "safetensors": safetensors.__version__,
            "python": platform.python_version(),
        },
        "file_bytes": rows[0]["bytes"],
        "rounds": rows,
        "choices": {"warm": rows[-1]["warm_choice"], "cold": rows[-1]["cold_choice"]},
    }
    return result | judge(rows)


def write(file, size):
    """A file of layers with random bytes, which no file system can pack."""
    import safetensors.torch
    import torch

    generator = torch.Generator().manual_seed(7)
    tensors, layer = {}, 0
    while size > 0:
        for name, shape in enumerate(SHAPES):
            values = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator)
            tensors[f"layers.{layer}.{name}"] = values.view(torch.bfloat16)
            size -= values.numel() * 2
            if size <= 0:
                break
        layer += 1
    safetensors.torch.save_file(tensors, file)
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())


def one_round(reader, file):
    """Every measurement once, those that are compared beside each other."""
    reader.ask("warm")
    row = {"touched_s": load_file(file, touch)}
    # Who fills memory does it once more before: a virtual machine's host takes back memory that is free for a while, and
    # finding it again takes longer than all else. Of what follows the best counts, as others may use the machine too.
    row["copied_s"] = min([load_file(file, copy) for _ in range(1 + REPEATS)][1:])
    ours = min([reader.ask("read", "auto") for _ in range(1 + REPEATS)][1:], key=lambda answer: answer["seconds"])
    row |= {"warm_s": ours["seconds"], "bytes": ours["bytes"], "warm_choice": choice(ours)}
    row["raw_s"] = cold(reader, "raw", RAW_BLOCK, RAW_DEPTH)["seconds"]
    ours = [cold(reader, "read", "auto") for _ in range(2)][1]
    row |= {"cold_s": ours["seconds"], "cold_choice": choice(ours), "cold_read_bytes": ours["report"]["bytes_read"]}
    for mode in ("buffered", "direct", "uring"):
        row[f"cold_{mode}_s"] = cold(reader, "read", mode)["seconds"]
    row["warm_ratio"] = row["copied_s"] / row["warm_s"]
    row["cold_ratio"] = row["raw_s"] / row["cold_s"]
    return row


def cold(reader, *words):
    """The answer to a command that finds nothing of the file in the page cache."""
    resident = reader.ask("drop")["resident"]
    if resident > 0.02:
        raise RuntimeError(f"{resident:.0%} of the file stays in the page cache: use a folder on a device")
    return reader.ask(*words)


def choice(answer):
    """What the reader says it did."""
    return answer["report"]["files"][0]["choice"]


def load_file(file, use):
    """Seconds that the official reader takes until every byte was used; it maps the file and reads nothing itself."""
    import safetensors.torch

    start = time.perf_counter()
    kept = [use(tensor) for tensor in safetensors.torch.load_file(file).values()]
    seconds = time.perf_counter() - start
    del kept
    return seconds


def copy(tensor):
    """Memory of its own, as ours are."""
    return tensor.clone()


def touch(tensor):
    """Every byte read once, nothing kept: less than what ours does."""
    import torch

    return tensor.view(torch.int16).max()


def judge(rows):
    """Medians, and what must hold."""
    numbers = [key for key, value in rows[0].items() if isinstance(value, float)]
    medians = {key: statistics.median(row[key] for row in rows) for key in numbers}
    lines = [
        {"what": what, "value": medians[key], "limit": limit, "holds": medians[key] >= limit}
        for what, key, limit in MUST_HOLD
    ]
    return {"medians": medians, "must_hold": lines}


def cpu():
    """The processor's name."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


LINES = (
    ("in the page cache", "ours, every byte copied", "warm_s"),
    ("", "load_file, every byte copied", "copied_s"),
    ("", "load_file, every byte looked at", "touched_s"),
    ("not in the page cache", "ours", "cold_s"),
    ("", "direct reads of 4 MiB by 16 threads, nothing kept", "raw_s"),
    ("", "ours, buffered", "cold_buffered_s"),
    ("", "ours, direct", "cold_direct_s"),
    ("", "ours, io_uring", "cold_uring_s"),
)


def page(result, source):
    """The whole page."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    gigabytes = result["file_bytes"] / 1e9
    lines = [
        "# Loading on the CPU",
        "",
        f"Made by `cargo xtask bench load --save` from [{source}]({source}); do not edit.",
        "",
        f"{result['cpu']}, {result['cores']} cores, Linux {result['kernel']}; {versions}; commit {result['commit']}.",
        f"One file of {gigabytes:.2f} GB with the tensors of a language model; medians of {len(result['rounds'])} rounds in one"
        " run. Each reader allocates fresh memory for every tensor, and reads once more just before, so that no virtual"
        f" machine's host has to find the memory first; where every byte is copied in the page cache, the best of {REPEATS}"
        " counts in each round, for either reader.",
        f"The machine's load average was {result['load_average']:.1f}: above its number of cores, others kept it busy.",
        "",
        "| the file is | reader | s | GB/s |",
        "|---|---|---|---|",
    ]
    for where, what, key in LINES:
        seconds = result["medians"][key]
        lines.append(f"| {where} | {what} | {seconds:.3f} | {gigabytes / seconds:.2f} |")
    lines.append("")
    for name, chosen in result["choices"].items():
        lines.append(f"What `auto` said, {name}: {chosen['mode']}, because {chosen['why']}.")
    lines += ["", "Must hold:", ""]
    for line in result["must_hold"]:
        verdict = "holds" if line["holds"] else "missed"
        lines.append(f"- {line['what']}: {line['value']:.2f}, at least {line['limit']}: {verdict}")
    return "\n".join(lines) + "\n"


def summary(result):
    """What must hold, for the terminal."""
    lines = [
        f"{'ok ' if line['holds'] else 'NO '} {line['what']}: {line['value']:.2f} (at least {line['limit']})"
        for line in result["must_hold"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
