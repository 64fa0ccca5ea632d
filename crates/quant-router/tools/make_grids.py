"""Writes src/ggml/tables/grids.rs from the tables that the `gguf` Python package (0.19) publishes.

The codebooks of ggml's IQ types are facts of the format: which vectors an index means. The package keeps them in `gguf.quants`;
here each vector becomes one 16-bit number that says which values of a short list it is made of.

    python make_grids.py            writes the file
    python make_grids.py --check    fails if the file is not what would be written
"""

import pathlib
import sys

import gguf.quants as quants

TARGET = pathlib.Path(__file__).parents[1] / "src/ggml/tables/grids.rs"
HEAD = """//! Codebooks of ggml's IQ types, written by `tools/make_grids.py` from the tables of the `gguf` Python package 0.19.
//!
//! A number is a vector. Its fields, lowest bits first, are indexes into the list of values that the type has: eight fields
//! of two bits, or four of four bits.

"""
# The type, the constant, what it is, and bits of a field.
GRIDS = [
    ("IQ2_XXS", "IQ2_XXS", "256 vectors of 8, from 8, 25, 43", 2),
    ("IQ2_XS", "IQ2_XS", "512 vectors of 8, from 8, 25, 43", 2),
    ("IQ2_S", "IQ2_S", "1024 vectors of 8, from 8, 25, 43", 2),
    ("IQ3_XXS", "IQ3_XXS", "256 vectors of 4, from 4, 12, 20, 28, 36, 44, 52, 62", 4),
    ("IQ3_S", "IQ3_S", "512 vectors of 4, from 1, 3, 5 to 15", 4),
    ("IQ1_S", "IQ1", "2048 vectors of 8, from -1, 0, 1", 2),
]


def packed(kind: type, bits: int) -> list[int]:
    """The vectors of one type as numbers."""
    kind.init_grid()
    rows = kind.grid.reshape(kind.grid_shape).tolist()
    indexes = {float(value): index for index, value in enumerate(kind.grid_map)}
    return [sum(indexes[value] << (bits * place) for place, value in enumerate(row)) for row in rows]


def text() -> str:
    """The whole file."""
    parts = [HEAD.rstrip("\n") + "\n"]
    for name, constant, about, bits in GRIDS:
        numbers = packed(getattr(quants, name), bits)
        lines = [numbers[start : start + 13] for start in range(0, len(numbers), 13)]
        body = "".join("    " + ", ".join(f"0x{number:04x}" for number in line) + ",\n" for line in lines)
        parts.append(
            f"\n/// {about}.\n#[rustfmt::skip]\npub(super) const {constant}: [u16; {len(numbers)}] = [\n{body}];\n"
        )
    return "".join(parts)


def main() -> int:
    """Writes or checks."""
    if sys.argv[1:] == ["--check"]:
        same = TARGET.read_text() == text()
        print("in sync" if same else f"{TARGET.name} is not what this script writes")
        return 0 if same else 1
    TARGET.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
