"""The bench `pipeline`: three models that take turns on a GPU under one budget, beside the same models resident.

    steps        of the transformer, beside max(resident compute, (model - budget) / link)
    switches     bringing a model's resident part to the device, beside its bytes / link
    generations  many of them: outputs equal the resident ones, and nothing grows

All in one process, ours and resident in turn. Exit status: 0 measured, 1 failed (or, with --check, a limit missed), 3 no
usable GPU.
"""

import argparse
import json
import pathlib
import platform
import statistics
import sys
import threading
import time

import measure
import pipeline_models
import place
import torch
import weightstream
from weightstream import offload, runtime

RED, NO_GPU = 1, 3
IDEAL_LIMIT, SWITCH_LIMIT, SWITCH_MORE = 1.05, 1.1, 0.020
# What may grow over all generations: RAM that the allocators keep, and nothing else.
RAM_GROWTH = 64 << 20
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
        result = run(options, pipeline_models.FULL)
    result = {"bench": "pipeline", "commit": options.commit, "python": platform.python_version(), **result}
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
        "--out", type=pathlib.Path, default=pathlib.Path("bench-pipeline.json"), help="where the JSON goes"
    )
    parser.add_argument("--page", type=pathlib.Path, help="make the page of this result instead of measuring")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument(
        "--budget-mb", type=int, default=3814, help="of each model, in units of 2^20 bytes; 3814 are 4 GB"
    )
    parser.add_argument("--seqs", type=lambda text: [int(part) for part in text.split(",")], default=[256, 4096])
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each length")
    parser.add_argument("--generations", type=int, default=50)
    parser.add_argument("--check", action="store_true", help="fail if something that must hold does not")
    return parser.parse_args()


def run(options, sizes):
    """Everything, in one process."""
    say("building the models")
    pipe = pipeline_models.build(sizes)
    twin = pipeline_models.resident(pipe)
    link = measure.link_rate()
    total = {name: weights(model) for name, model in pipe.components.items()}
    say(f"link {link / 1e9:.1f} GB/s; " + ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in total.items()))
    for model in pipe.components.values():
        model._offload_hooks = ["decode"] if hasattr(model, "decode") else []
    start = time.perf_counter()
    managed = offload.all(
        pipe.components,
        device=place.WEIGHTS,
        budgets={"*": options.budget_mb},
        pinnedMemory=True,
        quantizeTransformer=False,
        coTenantsMap={},
    )
    set_up = time.perf_counter() - start
    with managed:
        attachments = {name: one.attachment for name, one in managed.models.items()}
        budget = options.budget_mb << 20
        steps = [
            steps_of(pipe, twin, attachments, seq, options.steps, budget, total["transformer"], link)
            for seq in options.seqs
        ]
        switches = switches_of(pipe, attachments, link)
        many = generations_of(pipe, twin, attachments, options.generations)
        peak = max(attachment.report()["engine"]["page_bytes_peak"] for attachment in attachments.values())
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "versions": {"weightstream": weightstream.__version__, "torch": torch.__version__},
        "link_bytes_per_second": link,
        "model_bytes": total,
        "budget_bytes": budget,
        "set_up_seconds": set_up,
        "page_bytes_peak": peak,
        "steps": steps,
        "switches": switches,
        "generations": many,
    }


def steps_of(pipe, twin, attachments, seq, count, budget, total, link):
    """Steady steps of the transformer, ours and resident in turn."""
    context, x = twin.encode(0), twin.start(0, seq)
    ours, resident = lambda: pipe.step(x, context), lambda: twin.step(x, context)
    for _ in range(WARM):
        identical = torch.equal(ours(), resident())
    before = attachments["transformer"].stats()["copied_bytes"]
    found = measure.pairs(ours, resident, count)
    streamed = (attachments["transformer"].stats()["copied_bytes"] - before) / (2 * count)
    compute = statistics.median(theirs for _, (_, theirs) in found)
    ideal = max(compute, max(0, total - budget) / link)
    quartiles = measure.quartiles([mine / ideal for (_, mine), _ in found])
    say(f"S={seq}: {quartiles[1]:.3f} of ideal")
    return {
        "seq": seq,
        "identical": identical,
        "step_ms": statistics.median(mine for (_, mine), _ in found) * 1e3,
        "resident_ms": compute * 1e3,
        "ideal_ms": ideal * 1e3,
        "ratio_to_ideal": quartiles[1],
        "ratio_to_ideal_quartiles": quartiles,
        "streamed_bytes_per_step": streamed,
    }


def switches_of(pipe, attachments, link, rounds=7):
    """Each model brought after another: seconds, bytes, and what the link needs for them."""
    found = {name: [] for name in attachments}
    moved = {}
    for _ in range(rounds):
        for name, attachment in attachments.items():
            before = attachment.stats()["uploaded_bytes"]
            seconds = measure.timed(lambda name=name: runtime.ensure_loaded(pipe.components[name]))[1]
            moved[name] = attachment.stats()["uploaded_bytes"] - before
            found[name].append(seconds)
    rows = []
    for name, times in found.items():
        seconds = statistics.median(times[1:])
        transfer = moved[name] / link
        say(f"switch to {name}: {moved[name] / 1e9:.2f} GB in {seconds * 1e3:.1f} ms, link {transfer * 1e3:.1f} ms")
        rows.append({"model": name, "bytes": moved[name], "seconds": seconds, "transfer_seconds": transfer})
    return rows


def generations_of(pipe, twin, attachments, count):
    """Generations one after the other: what differs from the resident outputs, and what has grown from the fifth to the last."""
    differ, levels = 0, []
    seq = 256
    for number in range(count):
        image = pipe(number % 3, seq, 2)
        differ += not torch.equal(image, twin(number % 3, seq, 2))
        del image
        torch.cuda.synchronize()
        levels.append(level(attachments))
    first, last = levels[min(4, count - 1)], levels[-1]
    return {"count": count, "differ": differ, "first": first, "last": last}


def level(attachments):
    """What this process holds now."""
    free, total = torch.cuda.mem_get_info()
    return {
        "anonymous_bytes": measure.resident_anonymous(),
        "device_bytes": total - free,
        "locked_bytes": max(one.report()["host"]["registered_bytes"] for one in attachments.values()),
        "files": len(list(pathlib.Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
    }


def weights(model):
    """Bytes of all parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())


def must_hold(result):
    """Each line that must hold: what, its limit, the value found."""
    lines = []
    for row in result["steps"]:
        lines.append((f"step of the transformer beside ideal at S={row['seq']}", IDEAL_LIMIT, row["ratio_to_ideal"]))
        lines.append((f"outputs that differ at S={row['seq']}", 0, int(not row["identical"])))
    for row in result["switches"]:
        limit = SWITCH_LIMIT * row["transfer_seconds"] + SWITCH_MORE
        lines.append((f"seconds to bring {row['model']}, {row['bytes'] / 1e9:.2f} GB", round(limit, 4), row["seconds"]))
    many = result["generations"]
    lines.append((f"generations of {many['count']} that differ", 0, many["differ"]))
    grown = {name: many["last"][name] - many["first"][name] for name in many["first"]}
    lines.append(("bytes of RAM more after them", RAM_GROWTH, grown.pop("anonymous_bytes")))
    lines += [(f"{name.replace('_', ' ')} more after them", 0, value) for name, value in grown.items()]
    lines.append(("weight pages beside the budget", 1.0, result["page_bytes_peak"] / result["budget_bytes"]))
    return [{"what": what, "limit": limit, "value": value, "holds": value <= limit} for what, limit, value in lines]


def page(result, source):
    """The Markdown page of a result."""
    sizes = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in result["model_bytes"].items())
    lines = [
        "# Pipelines",
        "",
        f"Made by `cargo xtask bench pipeline --save` from [{source}]({source}); do not edit.",
        "",
        f"{result['device']}, link {result['link_bytes_per_second'] / 1e9:.1f} GB/s, PyTorch {result['versions']['torch']}; commit "
        f"{result['commit']}. {sizes}; {result['budget_bytes'] / 1e9:.1f} GB for whichever runs; set up in "
        f"{result['set_up_seconds']:.1f} s.",
        "",
        "| | limit | found | |",
        "|---|---|---|---|",
    ]
    for line in result["must_hold"]:
        lines.append(
            f"| {line['what']} | {line['limit']} | {line['value']:.3f} | {'holds' if line['holds'] else 'missed'} |"
        )
    return "\n".join(lines) + "\n"


def say(text):
    """Progress."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
