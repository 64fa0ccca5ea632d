"""Writes the Markdown page of docs/performance from a raw result: `table.py stream.json --out README.md`."""

import argparse
import json
import pathlib


def main():
    """Reads the JSON, writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("raw", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    options.out.write_text(page(json.loads(options.raw.read_text()), options.raw.name))


HEADINGS = [
    "library",
    "budget GB",
    "S",
    "step ms",
    "resident ms",
    "ideal ms",
    "of ideal",
    "of resident",
    "ready s",
    "peak RSS GB",
    "VRAM GB",
    "host µs a visit",
    "by PyTorch alone",
]


def page(result, source):
    """The whole page."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    rate = result["link_bytes_per_second"] / 1e9
    lines = [
        "# Performance",
        "",
        f"Made by `cargo xtask bench stream --save` from [{source}]({source}); do not edit.",
        "",
        f"{result['device']}, driver {result['driver']}, link {rate:.1f} GB/s; {versions}; commit {result['commit']}.",
        f"The model is a diffusion transformer of {result['model_bytes'] / 1e9:.1f} GB (tools/bench/dit.py).",
        "Ideal is the longer of the resident step and of sending what the budget does not hold.",
        "Ours and resident alternate in one process; ratios are medians, quartiles in brackets.",
        "By PyTorch alone: what as many waits, records and copies add to a resident step, made with `torch.cuda.Event`.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
        *map(row_line, result["rows"]),
    ]
    missed = [line for line in result["must_hold"] if not line["holds"]]
    if missed:
        lines += ["", "Missed so far:", ""]
        lines += [f"- {line['what']}: {line['value']:.3f}, the limit is {line['limit']}" for line in missed]
    return "\n".join(lines) + "\n"


def row_line(row):
    """One line of the table."""
    cells = [
        row["peer"],
        f"{row['budget_bytes'] / 1e9:.1f}",
        row["seq"],
        f"{row['step_ms']:.1f}",
        f"{row['resident_ms']:.1f}",
        f"{row['ideal_ms']:.1f}",
        ratio(row, "ratio_to_ideal"),
        ratio(row, "ratio_to_resident"),
        f"{row['ready_s']:.2f}",
        f"{row['peak_rss_bytes'] / 1e9:.1f}",
        f"{row['vram_bytes'] / 1e9:.2f}",
        *(decimal(row.get(key)) for key in ("host_us_per_visit", "host_us_per_visit_by_torch")),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def decimal(value):
    """A number with one decimal, or nothing."""
    return "" if value is None else f"{value:.1f}"


def ratio(row, key):
    """A ratio with its quartiles, where there are any."""
    spread = row.get(f"{key}_quartiles")
    return f"{row[key]:.3f}" + (f" [{spread[0]:.3f}, {spread[2]:.3f}]" if spread else "")


if __name__ == "__main__":
    main()
