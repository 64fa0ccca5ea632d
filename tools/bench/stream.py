"""The bench `stream`: how close a streamed model's step comes to the ideal one, and where other libraries stand.

    ideal = max(resident compute, (model - budget) / link)

Each library runs in processes of its own, one after the other, within one time limit; ours and resident weights
alternate in one process. Exit status: 0 measured, 1 failed (or, with --check, a limit missed), 3 no usable GPU.
"""

import argparse
import json
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
RED, NO_GPU = 1, 3
# Seconds that one process of a peer may take; one is not started with less left.
PEER_SECONDS = 110
# What must hold for weightstream: (budget, length) -> the most its step may be, of ideal or of resident.
IDEAL_LIMIT, RESIDENT_LIMIT = 1.05, 1.01
READY_LIMIT, RSS_LIMIT, HOST_LIMIT = 3.0, 1.05, 10.0
LONG = 16384


def main():
    """Measures, prints a table, writes the JSON."""
    options = parse()
    if not usable():
        print("no usable GPU", file=sys.stderr)
        return NO_GPU
    started = time.monotonic()
    spec = {"blocks": options.blocks, "budgets": options.budgets, "seqs": options.seqs, "pairs": options.pairs}
    ours, why = process("ours.py", spec, options.minutes * 60)
    if ours is None:
        print(f"bench stream: {why}", file=sys.stderr)
        return RED
    rows, skipped = ours.pop("rows"), []
    for peer in options.peers:
        found, missed = measure_peer(peer, options, started, rows, ours)
        rows, skipped = rows + found, skipped + missed
    result = {
        "bench": "stream",
        "commit": options.commit,
        "python": platform.python_version(),
        "driver": driver(),
        **ours,
        "seconds": time.monotonic() - started,
        "rows": rows,
        "skipped": skipped,
        "must_hold": must_hold(rows, ours["model_bytes"]),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(describe(result))
    missed = [line for line in result["must_hold"] if not line["holds"]]
    return RED if options.check and missed else 0


def parse():
    """The command line."""
    numbers = lambda text: [int(float(part)) for part in text.split(",") if part]  # noqa: E731
    names = lambda text: [part for part in text.split(",") if part]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("bench-stream.json"), help="where the JSON goes"
    )
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--budgets", type=numbers, default=[2_200_000_000, 9_000_000_000])
    parser.add_argument("--seqs", type=numbers, default=[256, 4096, LONG])
    parser.add_argument(
        "--peer-seqs", type=numbers, default=[256, 4096], help="a peer that plans for one length runs once each"
    )
    parser.add_argument("--pairs", type=int, default=20, help="our steps, each beside a resident one")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--peers", type=names, default=["flextensor"], help="as in tools/bench/peers; empty for none")
    parser.add_argument("--minutes", type=float, default=9, help="no further process is started after this")
    parser.add_argument("--check", action="store_true", help="fail if something that must hold does not")
    return parser.parse_args()


def usable():
    """Whether PyTorch can use a GPU."""
    probe = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == 0


def driver():
    """The GPU driver's version."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def process(script, spec, seconds):
    """Runs one measuring process; gives its result, or None and why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "out.json")
        command = [sys.executable, str(HERE / script), json.dumps(spec), str(out)]
        try:
            code = subprocess.run(command, stdout=sys.stderr, timeout=max(1, seconds)).returncode
        except subprocess.TimeoutExpired:
            return None, f"{script} was stopped after {seconds:.0f} s"
        if code != 0 or not out.exists():
            return None, f"{script} failed with exit status {code}"
        return json.loads(out.read_text()), None


def measure_peer(peer, options, started, ours, facts):
    """A peer's rows, and what was not measured and why. FlexTensor plans for the length it warms up with."""
    lengths = [[seq] for seq in options.peer_seqs] if peer == "flextensor" else [options.peer_seqs]
    rows, missed = [], []
    for budget in options.budgets:
        for seqs in lengths:
            left = options.minutes * 60 - (time.monotonic() - started)
            if left < PEER_SECONDS:
                found, why = None, "the time limit was reached"
            else:
                print(f"bench: {peer}, budget {budget / 1e9:.1f} GB, S={seqs}", file=sys.stderr, flush=True)
                spec = {"peer": peer, "blocks": options.blocks, "budget": budget, "seqs": seqs, "steps": 8}
                found, why = process("peer.py", spec, PEER_SECONDS)
            if found is None:
                missed.append({"peer": peer, "budget_bytes": budget, "seqs": seqs, "why": why})
            else:
                rows += [compared(row, ours, facts) for row in found]
    return rows, missed


def compared(row, ours, facts):
    """A peer's row beside our process's resident steps and its own link."""
    for own in ours:
        if (own["budget_bytes"], own["seq"]) == (row["budget_bytes"], row["seq"]):
            transfer = max(0, facts["model_bytes"] - row["budget_bytes"]) / row["link_bytes_per_second"] * 1e3
            row["resident_ms"] = own["resident_ms"]
            row["ideal_ms"] = max(own["resident_ms"], transfer)
            row["ratio_to_ideal"] = row["step_ms"] / row["ideal_ms"]
            row["ratio_to_resident"] = row["step_ms"] / own["resident_ms"]
    return row


def must_hold(rows, model_bytes):
    """Each line that must hold for weightstream: what, its limit, the value found."""
    lines = []
    for row in (row for row in rows if row["peer"] == "weightstream"):
        where = f"{row['budget_bytes'] / 1e9:.1f} GB, S={row['seq']}"
        if row["seq"] >= LONG:
            lines.append((f"step beside resident at {where}", RESIDENT_LIMIT, row["ratio_to_resident"]))
        else:
            lines.append((f"step beside ideal at {where}", IDEAL_LIMIT, row["ratio_to_ideal"]))
        lines += [
            (f"seconds until ready at {where}", READY_LIMIT, row["ready_s"]),
            (f"peak anonymous memory beside the model at {where}", RSS_LIMIT, row["peak_rss_bytes"] / model_bytes),
            (f"weight pages beside the budget at {where}", 1.0, row["peak_weight_bytes"] / row["budget_bytes"]),
            (f"outputs that differ at {where}", 0, int(not row["identical"])),
            (f"microseconds of host time a visit at {where}", HOST_LIMIT, row["host_us_per_visit"]),
            (
                f"the same beside a resident step that waits for copies too at {where}",
                HOST_LIMIT,
                row["host_us_per_visit_beside_waiting"],
            ),
        ]
    unique = dict.fromkeys((what, limit, value) for what, limit, value in lines)
    return [{"what": what, "limit": limit, "value": value, "holds": value <= limit} for what, limit, value in unique]


# Columns of the table for people: heading, width, format, key, divisor.
COLUMNS = [
    ("budget", 7, ".1f", "budget_bytes", 1e9),
    ("S", 6, ".0f", "seq", 1),
    ("step ms", 8, ".1f", "step_ms", 1),
    ("ideal", 8, ".1f", "ideal_ms", 1),
    ("/ideal", 7, ".3f", "ratio_to_ideal", 1),
    ("/resid.", 7, ".3f", "ratio_to_resident", 1),
    ("ready s", 8, ".2f", "ready_s", 1),
    ("RSS GB", 7, ".1f", "peak_rss_bytes", 1e9),
    ("VRAM GB", 8, ".2f", "vram_bytes", 1e9),
]


def describe(result):
    """The result for people."""
    rate = result["link_bytes_per_second"] / 1e9
    lines = [f"{result['device']}, driver {result['driver']}, link {rate:.1f} GB/s", ""]
    lines.append(f"{'':14}" + "".join(f" {heading:>{width}}" for heading, width, *_ in COLUMNS))
    for row in result["rows"]:
        cells = (f" {row.get(key, 0) / divisor:{width}{form}}" for _, width, form, key, divisor in COLUMNS)
        lines.append(f"{row['peer']:14}" + "".join(cells))
    for host in filter(None, [result.get("host")]):
        lines.append(
            f"host time a visit: {host['host_us_per_visit']:.1f} us; as many waits, records and copies by PyTorch alone: "
            f"{host['host_us_per_visit_by_torch']:.1f} us"
        )
    for miss in result["skipped"]:
        lines.append(
            f"not measured: {miss['peer']} {miss['budget_bytes'] / 1e9:.1f} GB S={miss['seqs']}: {miss['why']}"
        )
    for line in result["must_hold"]:
        if not line["holds"]:
            lines.append(f"MISSED: {line['what']}: {line['value']:.3f}, limit {line['limit']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
