"""Times dequantization beside the `gguf` Python package, in one run on one machine, and prints a table.

    cargo build --release --package quant-router --example rate
    python tools/rate.py PATH_OF_THE_EXAMPLE [--types Q4_K,Q8_0] [--least 3]

Each type gets the same random blocks on both sides: 1024 rows of 4096. The package runs as it is: numpy, one thread. With `--least`
the exit status is 1 if Q4_K on one thread is not so many times as fast.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import gguf
import numpy

ROWS, COLUMNS = 1024, 4096
ELEMENTS = ROWS * COLUMNS
ROUNDS = 3


def package_seconds(kind: gguf.GGMLQuantizationType, blocks: numpy.ndarray) -> float:
    """The best of several runs of the package."""
    best, begin = float("inf"), time.perf_counter()
    runs = 0
    with numpy.errstate(all="ignore"):
        while runs < 3 or time.perf_counter() - begin < 0.3:
            start = time.perf_counter()
            gguf.quants.dequantize(blocks, kind)
            best = min(best, time.perf_counter() - start)
            runs += 1
    return best


def ours_seconds(example: str, kind: str, path: pathlib.Path, target: str, threads: int) -> float:
    """The best of several runs of the example."""
    words = [example, kind, str(path), str(COLUMNS), target, str(threads)]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example")
    parser.add_argument(
        "--types", default=",".join(kind.name for kind in gguf.quants._type_traits if kind.name != "BF16")
    )
    parser.add_argument("--least", type=float)
    arguments = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    print(f"| 10⁹ elements/s | gguf | f32, 1 thread | bf16, 1 thread | f32, {threads} threads | f32, 1 thread ÷ gguf |")
    print("|---|---|---|---|---|---|")
    factors = {}
    for name in arguments.types.split(","):
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        random = numpy.random.default_rng(0)
        blocks = random.integers(0, 256, (ROWS, COLUMNS // elements * size), dtype=numpy.uint8)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "blocks"
            path.write_bytes(blocks.tobytes())
            runs = [("f32", 1), ("bf16", 1), ("f32", threads)]
            seconds = [float("inf")] * (1 + len(runs))
            # By turns, so that whatever else the machine does meets both.
            for _ in range(ROUNDS):
                seconds[0] = min(seconds[0], package_seconds(kind, blocks))
                for place, (target, count) in enumerate(runs, 1):
                    took = ours_seconds(arguments.example, name, path, target, count)
                    seconds[place] = min(seconds[place], took)
        factors[name] = seconds[0] / seconds[1]
        rates = " | ".join(f"{ELEMENTS / second / 1e9:.2f}" for second in seconds)
        print(f"| `{name}` | {rates} | {factors[name]:.1f} |", flush=True)
    return 1 if arguments.least and factors.get("Q4_K", 0) < arguments.least else 0


if __name__ == "__main__":
    sys.exit(main())
