"""The demo: one real model, resident and then streamed through a memory budget, compared bit for bit.

Three processes run one after the other, so that never two of them compute at once: `prepare` (check the model's files,
dequantize once), `resident` (never imports weightstream) and `streamed`. This file starts them, compares, and prints.
It uses the standard library only.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from budgets import check_budget, parse_budget

HERE = pathlib.Path(__file__).resolve().parent
# A little above the smallest budget that works: on CUDA memory comes in pieces of 2 MiB, on the emulator of 64 KiB.
DEFAULT_BUDGETS = {
    ("smollm2", "host"): "25%w",
    ("minilm", "host"): "65%w",
    ("smollm2", "cuda"): "27%w",
    ("minilm", "cuda"): "68%w",
}
# What the streamed process says when the device cannot be used, and when the budget or the model is refused.
NO_DEVICE, REFUSED = 3, 4


class Failed(Exception):
    """A step that did not give a result."""


def main():
    """Runs the demo; the exit status is 0 if the outputs are identical and the budget was kept."""
    arguments = parse()
    try:
        outcome = run(arguments)
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(outcome) if arguments.json else describe(outcome))
    return 0 if outcome["identical"] and outcome["peak_weight_bytes"] <= outcome["budget_bytes"] else 1


def parse():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["smollm2", "minilm"], default="smollm2")
    parser.add_argument("--budget", help='bytes, "64MiB" or "25%%w" (of the weights)')
    parser.add_argument("--device", type=device_name, default="auto", help='"auto", "host" or "cuda:N"')
    parser.add_argument("--tokens", type=positive, default=32, help="tokens to generate (smollm2)")
    parser.add_argument(
        "--cache", type=pathlib.Path, default=pathlib.Path(".cache"), help="where prepared weights are kept"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser.parse_args()


def device_name(text):
    """A device as the command line names it."""
    if not re.fullmatch(r"auto|host|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f'{text!r} is not a device; write "auto", "host" or "cuda:N"')
    return text


def positive(text):
    """A whole number above zero."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
    return int(text)


def run(arguments):
    """Prepares, runs both, and gives what is printed."""
    cores = len(os.sched_getaffinity(0))
    spec = {
        "model": arguments.model,
        "tokens": arguments.tokens,
        "cache": str(arguments.cache.resolve()),
        "threads": max(1, cores - 1),
    }
    if arguments.budget is not None:
        try:
            check_budget(arguments.budget)
        except ValueError as error:
            raise Failed(error) from error
    prepared, _ = step("prepare", spec)
    spec["folder"] = prepared["folder"]
    for device in devices(arguments.device, prepared["cuda"]):
        asked = arguments.budget or DEFAULT_BUDGETS[arguments.model, device.split(":")[0]]
        try:
            budget = parse_budget(asked, prepared["weights_bytes"])
        except ValueError as error:
            raise Failed(error) from error
        spec |= {"device": device, "budget_bytes": budget}
        resident, _ = step("resident", spec)
        streamed, code = step("streamed", spec)
        if code != NO_DEVICE:
            return compare(spec, asked, prepared, resident, streamed)
        say(f"{device} cannot be used: {streamed['why']}")
    raise Failed("no device can be used")


def devices(asked, cuda):
    """The devices to try, in order."""
    if asked.startswith("cuda") and not cuda:
        raise Failed(f"PyTorch sees no CUDA device, so {asked} cannot be used; give --device host")
    if asked != "auto":
        return [asked]
    return ["cuda:0", "host"] if cuda else ["host"]


def step(name, spec):
    """Runs one process of the demo; gives its result and exit status."""
    say(
        {
            "prepare": "checking the model's files",
            "resident": "running with resident weights",
            "streamed": f"running with {spec.get('budget_bytes', 0) / 2**20:.1f} MiB for weights",
        }[name]
    )
    environment = os.environ | {"OMP_NUM_THREADS": str(spec["threads"]), "MKL_NUM_THREADS": str(spec["threads"])}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "result.json")
        command = [sys.executable, str(HERE / "worker.py"), name, json.dumps(spec), str(out)]
        # Its output goes to our error stream: standard output carries the result alone.
        code = subprocess.run(command, env=environment, stdout=sys.stderr).returncode
        if code not in (0, NO_DEVICE, REFUSED) or not out.exists():
            raise Failed(f"the step {name} failed with exit status {code}")
        result = json.loads(out.read_text())
        if code == REFUSED:
            raise Failed(result["why"])
        return result, code


def compare(spec, asked, prepared, resident, streamed):
    """The demo's result, as documented in the README."""
    identical = resident["outputs"] == streamed["outputs"]
    transfer = streamed["streamed_bytes_per_step"] / streamed["link_bytes_per_second"]
    floor = max(resident["seconds_per_step"], transfer)
    return {
        "model": prepared["name"],
        "step": prepared["step"],
        "device": spec["device"],
        "device_name": streamed["device_name"],
        "threads": spec["threads"],
        "weights_bytes": prepared["weights_bytes"],
        "budget": asked,
        "budget_bytes": spec["budget_bytes"],
        "peak_weight_bytes": streamed["peak_weight_bytes"],
        "streamed_bytes_per_step": streamed["streamed_bytes_per_step"],
        "identical": identical,
        "tokens": streamed["tokens"],
        "text": streamed["text"],
        "attach_seconds": streamed["attach_seconds"],
        "seconds_per_step": {
            "resident": resident["seconds_per_step"],
            "streamed": streamed["seconds_per_step"],
            "floor": floor,
        },
        "link_bytes_per_second": streamed["link_bytes_per_second"],
        "versions": streamed["versions"],
    }


def describe(outcome):
    """The result for people."""
    step, seconds = outcome["step"], outcome["seconds_per_step"]
    kept = "within" if outcome["peak_weight_bytes"] <= outcome["budget_bytes"] else "OVER"
    share = f"{100 * outcome['budget_bytes'] / outcome['weights_bytes']:.1f} % of the weights"
    rate = f"over a link of {outcome['link_bytes_per_second'] / 1e9:.1f} GB/s"
    beside = f"resident {seconds['resident'] * 1e3:.1f} ms, floor {seconds['floor'] * 1e3:.1f} ms"
    same = "identical to" if outcome["identical"] else "DIFFERENT FROM"
    return "\n".join(
        [
            "",
            f"{outcome['model']} on {outcome['device_name']} ({outcome['device']}), threads: {outcome['threads']}",
            "",
            line("weights", mebibytes(outcome["weights_bytes"]), ""),
            line("budget", mebibytes(outcome["budget_bytes"]), share),
            line("peak weight memory", mebibytes(outcome["peak_weight_bytes"]), f"{kept} the budget"),
            line(f"streamed a {step}", mebibytes(outcome["streamed_bytes_per_step"]), rate),
            line(f"time a {step}", f"{seconds['streamed'] * 1e3:9.1f} ms ", beside),
            "",
            f"  {outcome['tokens']} tokens, {same} the resident run, bit for bit",
            f"  {outcome['text']!r}",
        ]
    )


def line(label, value, note):
    """One line of the result."""
    return f"  {label:18} {value}   {note}".rstrip()


def mebibytes(count):
    """A size for people."""
    return f"{count / 2**20:9.1f} MiB"


def say(text):
    """Progress, apart from the result."""
    print(f"demo: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
