"""The bench `dequant`: quantized weights to numbers on a GPU, by format, in bytes moved a second.

Bytes moved are those of the parts and of the numbers, each once. What they are compared with is a copy on the same device in the
same run, which counts what it reads and writes; beside it stand PyTorch's operators and, where they are installed, other
libraries. Every round takes other memory than the one before, so that the cache holds none of it.
"""

import statistics
import sys

import dequant_formats
import dequant_peers
import place
import single
import torch

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# Of the rate of a copy. Tables cost look-ups besides.
LIMIT, TABLE_LIMIT = 0.6, 0.3
SETS = 3


def main():
    """Measures, prints the page, writes the JSON."""
    return single.measured(parse(), measure, must_hold, page)


def parse():
    """The command line."""
    parser = single.parser("dequant", __doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="", help="formats whose name contains this")
    return parser.parse_args()


def measure(options):
    """The copy, and every format."""
    from weightstream import _native

    kernels = _native.DeviceKernels(torch.cuda.current_device())
    shape = options.rows, options.columns
    formats = [row for row in dequant_formats.described(*shape) if options.only in row[0]]
    rows = []
    for name, weight, sizes in formats:
        rows += one_format(kernels, name, weight, sizes, options)
        print(f"{name}: {rows[-3]['seconds'] * 1e6:.0f} us", file=sys.stderr, flush=True)
    shape = {"rows": options.rows, "columns": options.columns}
    return {**shape, "copy_bytes_per_second": copy_rate(options), "formats": rows}


def one_format(kernels, name, weight, sizes, options):
    """A format in every type of numbers, and once by others."""
    sets = [dequant_formats.filled(name, weight, sizes, numbers) for _ in range(SETS)]
    given = [{tensor: (part.data_ptr(), part.nbytes) for tensor, part in parts.items()} for parts in sets]
    found = []
    for label, dtype in DTYPES.items():
        out = [torch.empty(options.rows, options.columns, dtype=dtype, device=place.TENSORS) for _ in range(SETS)]
        stream = torch.cuda.current_stream().cuda_stream

        def step(index, out=out, dtype=dtype):
            rows = (0, weight.rows)
            kernels.dequantize(weight, given[index], rows, out[index].data_ptr(), NAMES[dtype], stream)

        seconds = timed(step, options.rounds)
        moved = sum(sizes.values()) + out[0].nbytes
        row = {"format": name, "dtype": label, "bytes": moved, "seconds": seconds, "bytes_per_second": moved / seconds}
        if label == "bf16":
            row["others"] = beside(name, weight, sets, options)
        found.append(row)
    return found


def beside(name, weight, sets, options):
    """Seconds of others for the same weight as bf16, by their names."""
    found = {}
    for other, make in dequant_peers.of(name, weight).items():
        try:
            calls = [make(parts) for parts in sets]
            found[other] = timed(lambda index, calls=calls: calls[index](), max(3, options.rounds // 3))
        except Exception as error:  # noqa: BLE001  another library's failure is a result
            found[other] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return found


def numbers(size):
    """Bytes of which every float they may be is a number: the highest bit of all exponents is 0."""
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=place.TENSORS) & 0xBF


def timed(step, rounds):
    """The median of single steps in seconds, by the device's clock."""
    for index in range(SETS):
        step(index)
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for number, (start, end) in enumerate(marks):
        start.record()
        step(number % SETS)
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3


def copy_rate(options):
    """Bytes read and written a second by a copy of as much as the numbers are."""
    count = options.rows * options.columns * 2
    pairs = [[torch.empty(count, dtype=torch.uint8, device=place.TENSORS) for _ in range(2)] for _ in range(SETS)]
    return 2 * count / timed(lambda index: pairs[index][0].copy_(pairs[index][1]), options.rounds)


def is_table(name):
    """Whether a format's numbers come out of tables of vectors."""
    return name.startswith(("IQ1", "IQ2", "IQ3", "TQ"))


def must_hold(result):
    """Each format's rate beside what it must be at least, of the copy's."""
    lines = []
    for row in result["formats"]:
        if row["dtype"] != "f32":
            share = row["bytes_per_second"] / result["copy_bytes_per_second"]
            limit = TABLE_LIMIT if is_table(row["format"]) else LIMIT
            what = f"{row['format']} as {row['dtype']}, of a copy's rate"
            lines.append({"what": what, "value": share, "limit": limit, "holds": share >= limit})
    return lines


def page(result, source):
    """The whole page."""
    copied = result["copy_bytes_per_second"]
    lines = [
        "# Dequantization on the device",
        "",
        f"Made by `cargo xtask bench dequant --save` from [{source}]({source}); do not edit.",
        "",
        f"{result['device']}, PyTorch {result['torch']}, commit {result['commit']}. Weights of {result['rows']} x {result['columns']};",
        f"a copy moves {copied / 1e9:.0f} GB/s. GB/s count the bytes of the parts and of the numbers; in brackets the share of the copy.",
        "",
        "| format | bf16 | f16 | f32 | bf16 by others, times as long |",
        "|---|---|---|---|---|",
    ]
    by_format = {}
    for row in result["formats"]:
        by_format.setdefault(row["format"], {})[row["dtype"]] = row
    for name, rows in by_format.items():
        cells = [f"{r['bytes_per_second'] / 1e9:.0f} ({r['bytes_per_second'] / copied:.2f})" for r in rows.values()]
        ours, others = rows["bf16"]["seconds"], rows["bf16"]["others"]
        told = [f"{other} {seconds / ours:.1f}" for other, seconds in others.items() if not isinstance(seconds, str)]
        lines.append(f"| {name} | {' | '.join(cells)} | {', '.join(told)} |")
    failed = {
        f"{other}: {why}"
        for rows in by_format.values()
        for other, why in rows["bf16"]["others"].items()
        if isinstance(why, str)
    }
    lines += ["", *(f"Not measured: {text}" for text in sorted(failed))]
    missed = [line for line in result["must_hold"] if not line["holds"]]
    lines += [
        "",
        "Must hold: " + (f"{len(missed)} of {len(result['must_hold'])} are missed." if missed else "all of it does."),
    ]
    lines += [f"- {line['what']}: {line['value']:.2f}, at least {line['limit']}: missed" for line in missed]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
