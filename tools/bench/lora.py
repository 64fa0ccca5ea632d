"""The bench `lora`: steps with 1, 4 and 8 LoRAs of rank 32 on every linear layer, beside none and beside PEFT's, and loading one.

    resident   the model on the GPU: ours beside none, and PEFT's unmerged layers
    streamed   under one budget: beside a step without, and the time of the bytes that the LoRAs add
    loading    a file from the page cache into the model on the GPU

All in one process."""

import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path

import dit
import measure
import place
import single
import torch
import weightstream
from weightstream import offload

RESIDENT_LIMITS = {1: 1.05, 4: 1.06, 8: 1.08}
STREAMED_LIMIT = 1.02
LOADING_LIMIT = 0.3
WARM = 3


def main():
    """Measures, prints the page, writes the JSON."""
    return single.measured(parse(), run, must_hold, page)


def parse():
    """The command line."""
    parser = single.parser("lora", __doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--budget", type=int, default=2_200_000_000)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--counts", type=single.numbers, default=[1, 4, 8])
    parser.add_argument("--bytes", type=int, default=600_000_000, help="of the file that is loaded")
    parser.add_argument("--steps", type=int, default=10)
    return parser.parse_args()


def run(options):
    """All of it, with files in a folder of their own."""
    single.say("building the model")
    model = dit.build(options.blocks)
    link = measure.link_rate()
    with tempfile.TemporaryDirectory(prefix="weightstream-bench-") as folder:
        files = [write(model, Path(folder) / f"{number}.safetensors", options.rank, number) for number in range(2)]
        # Several LoRAs of one file compute what several files do.
        paths = [files[number % 2] for number in range(max(options.counts))]
        streamed = stream(model, paths, options)
        resident = reside(model, paths, options)
        loading = load(model, Path(folder), options)
        model.to("cpu")
    for one, other in zip(resident, streamed, strict=True):
        other["identical"] = torch.equal(one.pop("output"), other.pop("output"))
    return {
        "link_bytes_per_second": link,
        "budget_bytes": options.budget,
        "seq": options.seq,
        "rank": options.rank,
        "lora_bytes": file_bytes(model, options.rank),
        "resident": resident,
        "streamed": streamed,
        "loading": loading,
    }


def linear_layers(model):
    """Every linear layer by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}


def file_bytes(model, rank):
    """Bytes of the factors of one LoRA."""
    return sum(2 * rank * (layer.in_features + layer.out_features) for layer in linear_layers(model).values())


def write(model, path, rank, seed):
    """A LoRA of a rank on every linear layer."""
    generator = torch.Generator(device=place.TENSORS).manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device=place.TENSORS, dtype=torch.bfloat16).mul_(0.01).cpu()

    factors = torch.nn.Module()
    for name, layer in linear_layers(model).items():
        put(factors, f"diffusion_model.{name}.lora_A", random(rank, layer.in_features))
        put(factors, f"diffusion_model.{name}.lora_B", random(layer.out_features, rank))
    offload.save_model(factors, path)
    return str(path)


def put(module, path, weight):
    """Makes `weight` the weight of a module inside `module`, by its path."""
    for part in path.split("."):
        if part not in module._modules:
            module.add_module(part, torch.nn.Module())
        module = module._modules[part]
    module.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))


def steps(model, options):
    """The median of a step's seconds, and its output."""
    arguments = dit.inputs(options.seq)
    for _ in range(WARM):
        output = model(*arguments)
    times = [measure.timed(lambda: model(*arguments))[1] for _ in range(options.steps)]
    return statistics.median(times), output


def with_loras(model, paths, count):
    """Loads some, with multipliers that are none of 0 and 1."""
    multipliers = [0.75 - number / 64 for number in range(count)]
    accepted = offload.load_loras_into_model(model, paths[:count], multipliers)
    if accepted != paths[:count]:
        raise RuntimeError(f"refused: {model._loras_errors}")


def stream(model, paths, options):
    """Steps under the budget, and what they copy."""
    rows = []
    attachment = weightstream.attach(model, device=place.WEIGHTS, budget=options.budget)
    try:
        for count in [0, *options.counts]:
            if count:
                with_loras(model, paths, count)
            before = copied(attachment)
            seconds, output = steps(model, options)
            moved = (copied(attachment) - before) / (options.steps + WARM)
            rows.append({"loras": count, "step_ms": seconds * 1e3, "streamed_bytes_per_step": moved, "output": output})
            single.say(f"streamed, {count} LoRAs: {seconds * 1e3:.1f} ms")
        offload.unload_loras_from_model(model)
    finally:
        attachment.detach()
    return rows


def copied(attachment):
    """Bytes copied so far, of weights and of what streams beside them."""
    companies = [one for one in attachment._runtime.companions if hasattr(one, "stats")]
    return sum(one.stats()["copied_bytes"] for one in [attachment, *companies])


def reside(model, paths, options):
    """Steps of the model on the GPU: without LoRAs, with ours, with PEFT's."""
    model.to(place.TENSORS)
    rows = []
    for count in [0, *options.counts]:
        if count:
            with_loras(model, paths, count)
        seconds, output = steps(model, options)
        rows.append({"loras": count, "step_ms": seconds * 1e3, "output": output})
        single.say(f"resident, {count} LoRAs: {seconds * 1e3:.1f} ms")
    offload.unload_loras_from_model(model)
    if importlib.util.find_spec("peft") is None:
        single.say("PEFT is not installed, so it is not measured")
        return rows
    for row in rows[1:]:
        row["peft_ms"] = beside_peft(model, row["loras"], options)
        single.say(f"resident, {row['loras']} of PEFT's: {row['peft_ms']:.1f} ms")
    return rows


def beside_peft(model, count, options):
    """A step with so many adapters of PEFT's, milliseconds. The model is as it was afterwards."""
    import peft

    names = [name.rpartition(".")[2] for name in linear_layers(model)]
    targets = sorted(set(names))
    with torch.inference_mode(False), torch.no_grad():
        adapters = [f"number{number}" for number in range(count)]
        config = peft.LoraConfig(target_modules=targets, r=options.rank, init_lora_weights=False)
        for adapter in adapters:
            peft.inject_adapter_in_model(config, model, adapter)
        layers = [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
        for layer in layers:
            layer.set_adapter(adapters)
            layer.to(dtype=torch.bfloat16)
        try:
            return steps(model, options)[0] * 1e3
        finally:
            for parent in list(model.modules()):
                for name, child in list(parent.named_children()):
                    if isinstance(child, peft.tuners.lora.LoraLayer):
                        setattr(parent, name, child.get_base_layer())


def load(model, folder, options):
    """Loading one file of the size that is asked for into the model where it is."""
    rank = max(1, options.bytes // file_bytes(model, 1))
    path = write(model, folder / "large.safetensors", rank, 9)
    Path(path).read_bytes()  # into the page cache
    times = []
    for _ in range(3):
        start = time.perf_counter()
        with_loras(model, [path], 1)
        measure.timed(lambda: None)
        times.append(time.perf_counter() - start)
    offload.unload_loras_from_model(model)
    single.say(f"loading {Path(path).stat().st_size / 1e6:.0f} MB: {min(times):.3f} s")
    return {"bytes": Path(path).stat().st_size, "seconds": min(times)}


def must_hold(result):
    """Each line that must hold: what, its limit, the value found."""
    lines = []
    resident, streamed = result["resident"], result["streamed"]
    plain, base = resident[0], streamed[0]
    for row in resident[1:]:
        limit = RESIDENT_LIMITS.get(row["loras"], max(RESIDENT_LIMITS.values()))
        lines.append((f"resident step with {row['loras']} LoRAs beside none", limit, row["step_ms"] / plain["step_ms"]))
    for row in streamed[1:]:
        added = row["streamed_bytes_per_step"] - base["streamed_bytes_per_step"]
        ideal = base["step_ms"] + max(0.0, added) / result["link_bytes_per_second"] * 1e3
        what = f"streamed step with {row['loras']} LoRAs beside the added bytes' time"
        lines.append((what, STREAMED_LIMIT, row["step_ms"] / ideal))
    differ = sum(not row["identical"] for row in streamed)
    lines.append(("streamed outputs that differ from the resident model's", 0, differ))
    lines.append(
        (f"seconds to load {result['loading']['bytes'] / 1e6:.0f} MB", LOADING_LIMIT, result["loading"]["seconds"])
    )
    return single.held(lines)


def page(result, source):
    """The Markdown page of a result."""
    lines = [
        "# LoRAs on the fly",
        "",
        f"Made by `cargo xtask bench lora --save` from [{source}]({source}); do not edit.",
        "",
        f"{result['device']}, link {result['link_bytes_per_second'] / 1e9:.1f} GB/s, PyTorch {result['torch']}; commit "
        f"{result['commit']}. S={result['seq']}, rank {result['rank']}, {result['lora_bytes'] / 1e6:.0f} MB a LoRA; budget "
        f"{result['budget_bytes'] / 1e9:.1f} GB.",
        "",
        "| LoRAs | resident ms | PEFT's ms | streamed ms | GB a streamed step |",
        "|---|---|---|---|---|",
    ]
    for one, other in zip(result["resident"], result["streamed"], strict=True):
        beside = f"{one['peft_ms']:.1f}" if "peft_ms" in one else ""
        lines.append(
            f"| {one['loras']} | {one['step_ms']:.1f} | {beside} | {other['step_ms']:.1f} | "
            f"{other['streamed_bytes_per_step'] / 1e9:.2f} |"
        )
    loading = result["loading"]
    lines += [
        "",
        f"A file of {loading['bytes'] / 1e6:.0f} MB in the page cache is loaded in {loading['seconds']:.3f} s.",
        "",
    ]
    lines += single.bullets(result["must_hold"])
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
