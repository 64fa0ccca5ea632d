"""The bench `ready`: from a checkpoint in the page cache to a streaming model, and streaming without page-locked weights.

    file in the page cache ─ load (map) ─ attach (lock, plan, upload) ─ first step: seconds, RAM, and a second process beside
    locked ─ staged                  the same steps with weights locked, and with nothing locked but the staging ring
    torch.empty(pin_memory=True) ─ slab      locking as many bytes

Every measurement runs in processes of its own; what is compared was measured in one run. Exit status: 0 measured, 1
failed (or, with --check, a limit missed), 3 no usable GPU.
"""

import argparse
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
RED, NO_GPU = 1, 3
GIB = 1 << 30
READY_LIMIT, ANON_LIMIT, SECOND_LIMIT = 1.5, 1.0, 0.25
HIDDEN_LIMIT, COPY_LIMIT, LOCK_LIMIT, LOCKED_LIMIT = 1.05, 0.9, 5.0, 1.03


def main():
    """Measures, prints a table, writes the JSON."""
    options = parse()
    if options.page:
        options.out.write_text(page(json.loads(options.page.read_text()), options.page.name))
        return 0
    probe = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode:
        print("no usable GPU", file=sys.stderr)
        return NO_GPU
    started = time.monotonic()
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "model.safetensors"
    try:
        result = {"bench": "ready", "commit": options.commit, "python": platform.python_version()}
        result |= {"seqs": options.seqs, "budget": options.budget}
        result |= ask(process("write", file, blocks=options.blocks))
        result["ready"] = two_processes(file, options)
        result["staged"] = ask(process("staged", file, blocks=options.blocks, seqs=options.seqs, budget=options.budget))
    finally:
        file.unlink(missing_ok=True)
    if options.locker:
        result["lock"] = locking(options)
    result |= {"seconds": time.monotonic() - started, "must_hold": must_hold(result)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for line in result["must_hold"]:
        print(f"{'holds ' if line['holds'] else 'MISSED'} {line['what']}: {line['value']:.3f} (limit {line['limit']})")
    missed = [line for line in result["must_hold"] if not line["holds"]]
    return RED if options.check and missed else 0


def parse():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("bench-ready.json"), help="where the JSON goes"
    )
    parser.add_argument("--page", type=pathlib.Path, help="make the page of this result instead of measuring")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--blocks", type=int, default=19, help="of 703 MB each; 19 are 12.4 GiB")
    parser.add_argument("--budget", type=int, default=2_200_000_000)
    parser.add_argument("--seqs", type=lambda text: [int(part) for part in text.split(",")], default=[256, 16384])
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("bench-ready"), help="where the file goes")
    parser.add_argument(
        "--locker", type=pathlib.Path, help="the program that locks a slab; its part is left out without"
    )
    parser.add_argument("--lock-mib", type=int, default=8192)
    parser.add_argument("--check", action="store_true", help="fail if something that must hold does not")
    return parser.parse_args()


def process(task, file, **spec):
    """One measuring process; it prints one JSON object a line."""
    command = [sys.executable, str(HERE / "ready_task.py"), task, str(file), json.dumps(spec)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answer(running):
    """The next object a process prints."""
    line = running.stdout.readline()
    if not line:
        raise RuntimeError(f"{running.args[2]} ended with exit status {running.wait()}")
    return json.loads(line)


def ask(running):
    """The one object of a process that then ends."""
    found = answer(running)
    end(running)
    return found


def end(running):
    """Lets a process go on to its end."""
    running.stdin.close()
    if running.wait():
        raise RuntimeError(f"{running.args[2]} ended with exit status {running.returncode}")


def two_processes(file, options):
    """One process that loads and streams, and while it holds the model, another one."""
    spec = {"blocks": options.blocks, "budget": options.budget, "seq": options.seqs[0]}
    # The first one pays for what every first process pays for, such as reading PyTorch from disk.
    ask(process("ready", file, **spec))
    rounds = [ask(process("ready", file, **spec)) for _ in range(2)]
    first = process("ready", file, **spec)
    rounds.append(answer(first))
    before = memory()
    second = process("ready", file, **spec)
    beside = answer(second)
    after = memory()
    end(second)
    end(first)
    best = min(rounds, key=lambda row: row["ready_s"])
    median = statistics.median(row["ready_s"] for row in rounds)
    return best | {
        "rounds": rounds,
        "median_ready_s": median,
        "second": beside,
        "file_ram_added": after["Cached"] - before["Cached"],
        "available_taken": before["MemAvailable"] - after["MemAvailable"],
    }


def memory():
    """The machine's memory by kind, in bytes."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}


def locking(options):
    """Locking as many bytes by PyTorch and in a slab."""
    command = [str(options.locker.resolve()), "cuda", str(options.lock_mib)]
    ours, torch = [], []
    for _ in range(3):
        torch.append(ask(process("pin", "-", bytes=options.lock_mib << 20))["seconds"])
        ours.append(
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        )
    return {"bytes": options.lock_mib << 20, "torch_s": torch, "ours": ours}


def must_hold(result):
    """Each line that must hold: what, its limit, the value found."""
    ready, staged, file_bytes = result["ready"], result["staged"], result["file_bytes"]
    lines = [
        ("seconds from the call to a first step", ready["median_ready_s"], READY_LIMIT, True),
        ("GiB of anonymous memory added", ready["anonymous_added"] / GIB, ANON_LIMIT, True),
        (
            "file memory a second process adds, of the file",
            ready["file_ram_added"] / file_bytes,
            SECOND_LIMIT / 10,
            True,
        ),
    ]
    for row in staged["rows"]:
        if row["seq"] >= 16384:
            lines.append(
                (f"staged step of the locked one, S={row['seq']}", row["staged_of_locked"], HIDDEN_LIMIT, True)
            )
        else:
            rate = row["staged_bytes_per_second"] / staged["copy_bytes_per_second"]
            lines.append((f"staged rate of the rate of RAM copies, S={row['seq']}", rate, COPY_LIMIT, False))
    if "lock" in result:
        slab = statistics.median(row["slab"]["seconds"] for row in result["lock"]["ours"])
        lines.append(
            (
                "times as fast as torch's pin_memory",
                statistics.median(result["lock"]["torch_s"]) / slab,
                LOCK_LIMIT,
                False,
            )
        )
    return [
        {"what": what, "value": value, "limit": limit, "holds": value <= limit if most else value >= limit}
        for what, value, limit, most in lines
    ]


def page(result, raw):
    """The page in docs/performance."""
    ready, second = result["ready"], result["ready"]["second"]
    seconds = lambda row: " | ".join(f"{row[key]:.2f}" for key in ("load_s", "attach_s", "first_step_s", "ready_s"))  # noqa: E731
    lines = [
        "# From a checkpoint to a streaming model",
        "",
        f"Made by `cargo xtask bench ready --save` from [{raw}]({raw}); do not edit. Commit {result['commit']}.",
        "",
        f"A checkpoint of {result['file_bytes'] / 1e9:.1f} GB in the page cache; load maps it, attach page-locks it where the page",
        "cache has it and uploads what is resident, then one step runs. Seconds; memory in MB.",
        "",
        "| process | load | attach | first step | in all | anonymous memory added |",
        "|---|---|---|---|---|---|",
        f"| alone | {seconds(ready)} | {ready['anonymous_added'] / 1e6:.0f} |",
        f"| beside one that streams the same file | {seconds(second)} | {second['anonymous_added'] / 1e6:.0f} |",
        "",
        f"The second process adds {result['ready']['file_ram_added'] / 1e6:.0f} MB of file memory.",
        "",
        "Nothing locked but the staging ring, beside weights locked where they are; medians, in one process:",
        "",
        "| S | locked ms | staged ms | staged of locked | staged GB/s |",
        "|---|---|---|---|---|",
    ]
    for row in result["staged"]["rows"]:
        locked, staged = row["locked_ms"][1], row["staged_ms"][1]
        rate = row["staged_bytes_per_second"] / 1e9
        lines.append(f"| {row['seq']} | {locked:.1f} | {staged:.1f} | {row['staged_of_locked']:.3f} | {rate:.1f} |")
    copied = result["staged"]["copy_bytes_per_second"] / 1e9
    lines += ["", f"Eight threads read the file from the page cache into page-locked memory at {copied:.1f} GB/s.", ""]
    if "lock" in result:
        slabs = [row["slab"]["seconds"] for row in result["lock"]["ours"]]
        torch_s, gigabytes = statistics.median(result["lock"]["torch_s"]), result["lock"]["bytes"] / 1e9
        lines += [
            f"Page-locking {gigabytes:.1f} GB: `torch.empty(pin_memory=True)` {torch_s:.2f} s, a slab, copying the bytes into it "
            f"included, {statistics.median(slabs):.2f} s.",
            "",
        ]
    lines += ["Must hold:", ""]
    lines += [
        f"- {line['what']}: {line['value']:.3f}, the limit is {line['limit']}: {'holds' if line['holds'] else 'missed'}"
        for line in result["must_hold"]
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if shutil.disk_usage(os.getcwd()).free < 20 * GIB:
        print("needs 20 GiB of disk", file=sys.stderr)
        sys.exit(RED)
    sys.exit(main())
