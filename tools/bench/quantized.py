"""The bench `quantized`: a streamed model of int8 weights beside the same one in bfloat16, under one budget.

    both bound by the link     steps as bytes: half the weights, half the step
    outputs                    those of the quantized model with all weights on the GPU, bit for bit

All in one process."""

import statistics
import sys
import time

import dit
import measure
import place
import single
import torch
import weightstream
from weightstream import offload

STEP_LIMIT = 0.55
WARM = 3


def main():
    """Measures, prints the page, writes the JSON."""
    return single.measured(parse(), run, must_hold, page)


def parse():
    """The command line."""
    parser = single.parser("quantized", __doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--budget", type=int, default=2_200_000_000)
    parser.add_argument("--seqs", type=single.numbers, default=[256, 1024])
    parser.add_argument("--steps", type=int, default=10)
    return parser.parse_args()


def run(options):
    """Both models, one after the other."""
    single.say("building the model")
    model = dit.build(options.blocks)
    link = measure.link_rate()
    plain = streamed(model, options)
    single.say("quantizing")
    start = time.perf_counter()
    offload.quantize(model, "qint8")
    seconds = time.perf_counter() - start
    quantized = streamed(model, options)
    return {
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
            single.say(f"{size / 1e9:.1f} GB, S={seq}: {rows[-1]['step_ms']:.1f} ms")
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
    return single.held(lines)


def page(result, source):
    """The Markdown page of a result."""
    lines = [
        "# Streaming quantized weights",
        "",
        f"Made by `cargo xtask bench quantized --save` from [{source}]({source}); do not edit.",
        "",
        f"{result['device']}, link {result['link_bytes_per_second'] / 1e9:.1f} GB/s, PyTorch {result['torch']}; commit "
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
    lines += single.bullets(result["must_hold"])
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
