"""Benches that measure in one process on a GPU: their common options, what becomes of a result, and the lines that must hold.

Exit status: 0 measured, 1 failed (or, with --check, a limit missed), 3 no usable GPU.
"""

import argparse
import json
import pathlib
import platform
import sys
import time

import place
import torch

RED, NO_GPU = 1, 3


def parser(name, summary):
    """The options that all of them have; each adds its own."""
    made = argparse.ArgumentParser(description=summary)
    out = pathlib.Path(f"bench-{name}.json")
    made.add_argument("--out", type=pathlib.Path, default=out, help="where the JSON goes")
    made.add_argument("--page", type=pathlib.Path, help="make the page of this result instead of measuring")
    made.add_argument("--commit", default="unknown")
    made.add_argument("--check", action="store_true", help="fail if something that must hold does not")
    made.set_defaults(name=name)
    return made


def measured(options, run, must_hold, page):
    """Measures with `run(options)`, writes the JSON, prints what `must_hold(result)` gives; or makes the page of a result."""
    if options.page:
        options.out.write_text(page(json.loads(options.page.read_text()), options.page.name))
        return 0
    if not torch.cuda.is_available():
        print("no usable GPU", file=sys.stderr)
        return NO_GPU
    started = time.monotonic()
    with torch.inference_mode():
        result = run(options)
    facts = {"bench": options.name, "commit": options.commit, "python": platform.python_version()}
    facts |= {"device": torch.cuda.get_device_name(place.TENSORS), "torch": torch.__version__}
    result = {**facts, **result, "seconds": time.monotonic() - started}
    result["must_hold"] = must_hold(result)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(page(result, options.out.name))
    return RED if options.check and not all(line["holds"] for line in result["must_hold"]) else 0


def held(lines):
    """Lines of what, limit and value, and whether each holds."""
    return [{"what": what, "limit": limit, "value": value, "holds": value <= limit} for what, limit, value in lines]


def bullets(lines):
    """Such lines as Markdown."""
    return [
        f"- {line['what']}: {line['value']:.3f}, limit {line['limit']}, {'holds' if line['holds'] else 'missed'}"
        for line in lines
    ]


def numbers(text):
    """Whole numbers of an option, with commas between."""
    return [int(part) for part in text.split(",") if part]


def say(text):
    """Progress."""
    print(f"bench: {text}", file=sys.stderr, flush=True)
