"""The bench `pipeline`: three models that take turns on a GPU under one budget, beside the same models resident.

    steps        of the transformer, beside max(resident compute, (model - budget) / link)
    switches     bringing a model's resident part to the device, beside its bytes / link
    generations  many of them: outputs equal the resident ones, and nothing grows

All in one process, ours and resident in turn.
"""

import pathlib
import statistics
import sys
import threading
import time

import measure
import pipeline_parts
import place
import single
import torch
from weightstream import offload, runtime

IDEAL_LIMIT, SWITCH_LIMIT, SWITCH_MORE = 1.05, 1.1, 0.020
# What may grow over all generations: RAM that the allocators keep, and nothing else.
RAM_GROWTH = 64 << 20
WARM = 3


def main():
    """Measures, prints the page, writes the JSON."""
    return single.measured(parse(), run, must_hold, page)


def parse():
    """The command line."""
    parser = single.parser("pipeline", __doc__.splitlines()[0])
    parser.add_argument(
        "--budget-mb", type=int, default=3814, help="of each model, in units of 2^20 bytes; 3814 are 4 GB"
    )
    parser.add_argument("--seqs", type=single.numbers, default=[256, 4096])
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each length")
    parser.add_argument("--generations", type=int, default=50)
    return parser.parse_args()


def run(options, sizes=pipeline_parts.FULL):
    """Everything, in one process."""
    single.say("building the models")
    pipe = pipeline_parts.build(sizes)
    twin = pipeline_parts.resident(pipe)
    link = measure.link_rate()
    total = {name: weights(model) for name, model in pipe.components.items()}
    single.say(
        f"link {link / 1e9:.1f} GB/s; " + ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in total.items())
    )
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
    return {
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
    single.say(f"S={seq}: {quartiles[1]:.3f} of ideal")
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
        single.say(
            f"switch to {name}: {moved[name] / 1e9:.2f} GB in {seconds * 1e3:.1f} ms, link {transfer * 1e3:.1f} ms"
        )
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
    return single.held(lines)


def page(result, source):
    """The Markdown page of a result."""
    sizes = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in result["model_bytes"].items())
    lines = [
        "# Pipelines",
        "",
        f"Made by `cargo xtask bench pipeline --save` from [{source}]({source}); do not edit.",
        "",
        f"{result['device']}, link {result['link_bytes_per_second'] / 1e9:.1f} GB/s, PyTorch {result['torch']}; commit "
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


if __name__ == "__main__":
    sys.exit(main())
