"""The bench `quantized`: a streamed model of int8 weights beside the same one in bfloat16, under one budget.

    both bound by the link     steps as bytes: half the weights, half the step
    outputs                    those of the quantized model with all weights on the GPU, bit for bit

All in one process. Exit status: 0 measured, 1 failed (or, with --check, a limit missed), 3 no usable GPU.
"""

import argparse
import json
import pathlib
import platform
import statistics
import sys
import time

import dit
import measure
import place
import torch
import weightstream
from weightstream import offload

RED, NO_GPU = 1, 3
STEP_LIMIT = 0.55
WARM = 3


def main():
    """Measures, prints what must hold, writes the JSON."""
    options = parse()
    if options.page:
        options.out.write_text(page(json.loads(options.page.read_text()), options.page.name))
        return 0
    if not torch.cuda.is_available():
        print("no usable GPU", file=sys.stderr)
        return NO_GPU
    started = time.monotonic()
    with torch.inference_mode():
        result = run(options)
    result = {"bench": "quantized", "commit": options.commit, "python": platform.python_version(), **result}
    result |= {"seconds": time.monotonic() - started, "must_hold": must_hold(result)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for line in result["must_hold"]:
        print(f"{'holds ' if line['holds'] else 'MISSED'} {line['what']}: {line['value']:.3f} (limit {line['limit']})")
    return RED if options.check and not all(line["holds"] for line in result["must_hold"]) else 0


def parse():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("bench-quantized.json"), help="where the JSON goes"
    )
    parser.add_argument("--page", type=pathlib.Path, help="make the page of this result instead of measuring")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--budget", type=int, default=2_200_000_000)
    parser.add_argument("--seqs", type=lambda text: [int(part) for part in text.split(",")], default=[256, 1024])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--check", action="store_true", help="fail if something that must hold does not")
    return parser.parse_args()


def run(options):
    """Both models, one after the other."""
    say("building the model")
    model = dit.build(options.blocks)
    link = measure.link_rate()
    plain = streamed(model, options)
    say("quantizing")
    start = time.perf_counter()
    offload.quantize(model, "qint8")
    seconds = time.perf_counter() - start
    quantized = streamed(model, options)
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "versions": {"weightstream": weightstream.__version__, "torch": torch.__version__},
        "link_bytes_per_second": link,
        "budget_bytes": options.budget,
        "quantizing_seconds": seconds,
        "bfloat16": plain,
        "int8": quantized,
    }


def streamed(model, options):
    """Steps of a streamed model by length, and whether its outputs are those of the resident one."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    outputs, rows = {}, []
    attachment = weightstream.attach(model, device=place.WEIGHTS, budget=options.budget)
    try:
        for seq in options.seqs:
            arguments = dit.inputs(seq)
            for _ in range(WARM):
                outputs[seq] = model(*arguments)
            before = attachment.stats()["copied_bytes"]
            times = [measure.timed(lambda arguments=arguments: model(*arguments))[1] for _ in range(options.steps)]
            copied = (attachment.stats()["copied_bytes"] - before) / options.steps
            rows.append({"seq": seq, "step_ms": statistics.median(times) * 1e3, "streamed_bytes_per_step": copied})
            say(f"{size / 1e9:.1f} GB, S={seq}: {rows[-1]['step_ms']:.1f} ms")
    finally:
        attachment.detach()
    model.to(place.TENSORS)
    for row in rows:
        arguments = dit.inputs(row["seq"])
        row["identical"] = torch.equal(model(*arguments), outputs[row["seq"]])
        times = [measure.timed(lambda arguments=arguments: model(*arguments))[1] for _ in range(options.steps)]
        row["resident_ms"] = statistics.median(times) * 1e3
    model.to("cpu")
    return {"model_bytes": size, "rows": rows}


def must_hold(result):
    """Each line that must hold: what, its limit, the value found."""
    lines = []
    for plain, quantized in zip(result["bfloat16"]["rows"], result["int8"]["rows"], strict=True):
        ratio = quantized["step_ms"] / plain["step_ms"]
        lines.append((f"streamed int8 step beside the bfloat16 one at S={plain['seq']}", STEP_LIMIT, ratio))
        differ = 2 - plain["identical"] - quantized["identical"]
        lines.append((f"outputs that differ from the resident models' at S={plain['seq']}", 0, differ))
    return [{"what": what, "limit": limit, "value": value, "holds": value <= limit} for what, limit, value in lines]


def page(result, source):
    """The Markdown page of a result."""
    lines = [
        "# Streaming quantized weights",
        "",
        f"Made by `cargo xtask bench quantized --save` from [{source}]({source}); do not edit.",
        "",
        f"{result['device']}, link {result['link_bytes_per_second'] / 1e9:.1f} GB/s, PyTorch {result['versions']['torch']}; commit "
        f"{result['commit']}. Budget {result['budget_bytes'] / 1e9:.1f} GB.",
        "",
        "| weights | GB | S | step ms | resident ms | GB a step |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("bfloat16", "int8"):
        for row in result[name]["rows"]:
            lines.append(
                f"| {name} | {result[name]['model_bytes'] / 1e9:.1f} | {row['seq']} | {row['step_ms']:.1f} | "
                f"{row['resident_ms']:.1f} | {row['streamed_bytes_per_step'] / 1e9:.2f} |"
            )
    lines.append("")
    lines += [
        f"- {line['what']}: {line['value']:.3f}, limit {line['limit']}, {'holds' if line['holds'] else 'missed'}"
        for line in result["must_hold"]
    ]
    return "\n".join(lines) + "\n"


def say(text):
    """Progress."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
