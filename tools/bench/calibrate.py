"""The bench `calibrate`: the resident budget that a calibration recommends beside the largest one that runs, found by bisection.

ballast      takes all but a few GB of the device, so that the model does not fit
calibration  build_profile=True, one region: recommendation = total - peak - headroom
bisection    the same workload with a resident budget given by hand, smaller after it ran out of memory, larger after not
"""

import contextlib
import os
import sys
import tempfile

import dit
import place
import single
import torch
import weightstream
from weightstream import dynamic_offload as ddo

NEAR_LIMIT = 0.05
# Smaller layers stay on the device, as presets have it.
SMALL = 1 << 20


def main():
    """Measures, prints the page, writes the JSON."""
    return single.measured(parse(), beside_ballast, must_hold, page)


def parse():
    """The command line."""
    parser = single.parser("calibrate", __doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--room", type=float, default=14, help="GB that the ballast leaves")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--headroom", type=float, default=0.5, help="GiB that the recommendation leaves")
    parser.add_argument("--rounds", type=int, default=7, help="of the bisection")
    return parser.parse_args()


def beside_ballast(options):
    """Measures on a device of which something else has taken all but some room."""
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(max(0, free - int(options.room * 1e9)), dtype=torch.uint8, device=place.TENSORS)
    result = run(options)
    del ballast
    return result


def run(options):
    """The calibration, a run with what it recommends, and the bisection."""
    single.say("building the model")
    model = dit.build(options.blocks)
    arguments = dit.inputs(options.seq)
    headroom = {"profile_vram_headroom_gb": options.headroom}
    with tempfile.TemporaryDirectory() as folder, profiles_in(folder):
        with offloaded(model, profile_name="bench", build_profile=True, **headroom) as result:
            with result.profile_run() as report:
                expected = model(*arguments)
        recommended = report["recommendation"]["resident_module_budget_gb"]
        single.say(f"recommended: {recommended:.3f} GiB")
        with offloaded(model, profile_name="bench", **headroom) as result, result.profile_run() as report:
            applied = report["status"] == "applied" and torch.equal(model(*arguments), expected)
    low, high = 0.0, recommended + 2 * options.headroom + 1
    tries = []
    for _ in range(options.rounds):
        middle = (low + high) / 2
        fits = runs(model, arguments, middle)
        tries.append({"resident_gb": middle, "ran": fits})
        single.say(f"{middle:.3f} GiB {'ran' if fits else 'ran out of memory'}")
        low, high = (middle, high) if fits else (low, middle)
    return {
        "model_bytes": dit.weight_bytes(model),
        "headroom_gb": options.headroom,
        "recommended_gb": recommended,
        "applied": applied,
        "bisected_gb": low,
        "tries": tries,
    }


@contextlib.contextmanager
def profiles_in(folder):
    """Profiles are kept in this folder."""
    before = os.environ.get("DDO_PROFILE_DIR")
    os.environ["DDO_PROFILE_DIR"] = folder
    try:
        yield
    finally:
        os.environ.pop("DDO_PROFILE_DIR")
        if before is not None:
            os.environ["DDO_PROFILE_DIR"] = before


@contextlib.contextmanager
def offloaded(model, **options):
    """The model on the dynamic route."""
    result = ddo.enable_offload(
        model,
        route="dynamic_offload",
        execution_device=place.WEIGHTS,
        environ={},
        max_resident_module_budget_gb=0,
        small_tensor_threshold_bytes=SMALL,
        **options,
    )
    try:
        yield result
    finally:
        ddo.remove_dynamic_offload(model)
        torch.cuda.empty_cache()


def runs(model, arguments, resident_gb):
    """Whether the workload runs with this budget for residents."""
    try:
        with offloaded(model, resident_module_budget_gb=max(resident_gb, 1e-6)):
            for _ in range(2):
                model(*arguments)
            torch.cuda.synchronize()
    except (torch.OutOfMemoryError, weightstream.DeviceError, weightstream.BudgetError) as error:
        if not any(words in str(error) for words in ("memory", "the device has only")):
            raise
        return False
    return True


def must_hold(result):
    """Each line that must hold: what, its limit, the value found."""
    found = result["recommended_gb"] + result["headroom_gb"]
    lines = [
        (
            "recommended and headroom beside the bisected budget, off by",
            NEAR_LIMIT,
            abs(found / result["bisected_gb"] - 1),
        ),
        ("runs with the recommendation that failed or differed", 0, int(not result["applied"])),
    ]
    return single.held(lines)


def page(result, source):
    """The Markdown page of a result."""
    lines = [
        "# Calibration",
        "",
        f"Made by `cargo xtask bench calibrate --save` from [{source}]({source}); do not edit. Commit {result['commit']}.",
        "",
        f"A model of {result['model_bytes'] / 1e9:.1f} GB: {result['recommended_gb']:.3f} GiB of residents are recommended, with "
        f"{result['headroom_gb']:.2f} GiB of headroom; {result['bisected_gb']:.3f} GiB is the most that ran, found by bisection.",
        "",
    ]
    lines += single.bullets(result["must_hold"])
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
