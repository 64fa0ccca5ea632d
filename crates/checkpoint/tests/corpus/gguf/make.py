"""Makes the GGUF files that Rust's tests read, and what the gguf package reads in them.

Needs gguf 0.19.0 and its numpy. `python make.py` rewrites this folder; `python make.py --real FILE.gguf NAME` describes a
file that is not kept here, into NAME.json.
"""

import argparse
import json
import random
import struct
import zlib
from pathlib import Path

import gguf
import numpy as np

HERE = Path(__file__).parent
KEPT = 64  # lists of more elements are described by their length


def noise(size: int, seed: int) -> np.ndarray:
    """Bytes that are the same wherever this runs."""
    return np.frombuffer(random.Random(seed).randbytes(size), dtype=np.uint8)


def described(path: Path) -> dict:
    """What the gguf package says of a file."""
    reader = gguf.GGUFReader(path)
    fields = {}
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        value = field.contents()
        if isinstance(value, list) and len(value) > KEPT:
            value = {"elements": len(value), "first": value[0], "last": value[-1]}
        fields[key] = {"types": [kind.name for kind in field.types], "value": value}
    tensors = [
        {
            "name": tensor.name,
            "type": tensor.tensor_type.name,
            "shape": [int(dim) for dim in reversed(tensor.shape)],
            "start": int(tensor.data_offset),
            "bytes": int(tensor.n_bytes),
            "crc": zlib.crc32(tensor.data.tobytes()),
        }
        for tensor in reader.tensors
    ]
    version = int(reader.fields["GGUF.version"].contents())
    head = {"version": version, "alignment": int(reader.alignment), "data_start": int(reader.data_offset)}
    return head | {"fields": fields, "tensors": tensors}


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def begun(name: str, **options) -> gguf.GGUFWriter:
    """A writer of one file here."""
    return gguf.GGUFWriter(HERE / name, "test", **options)


def types() -> None:
    """One tensor of each type: two rows of two blocks."""
    writer = begun("types.gguf")
    for kind, (elements, size) in gguf.GGML_QUANT_SIZES.items():
        if kind == gguf.GGMLQuantizationType.Q8_1:
            continue  # 40 bytes a block in the package, 36 in ggml itself; never stored in files
        data = noise(4 * size, int(kind)).reshape(2, 2 * size)
        assert gguf.quant_shape_from_byte_shape(data.shape, kind) == (2, 2 * elements)
        writer.add_tensor(f"of.{kind.name}", data, raw_dtype=kind)
    finish(writer)


def values() -> None:
    """A value of each type, lists of each, short and long, and lists in lists."""
    writer = begun("values.gguf")
    kinds = gguf.GGUFValueType
    numbers = {
        kinds.UINT8: 200, kinds.INT8: -100, kinds.UINT16: 60000, kinds.INT16: -30000, kinds.UINT32: 4000000000,
        kinds.INT32: -2000000000, kinds.FLOAT32: 0.15625, kinds.UINT64: 2**63 + 1, kinds.INT64: -(2**63),
        kinds.FLOAT64: 0.1, kinds.BOOL: True,
    }  # fmt: skip
    for kind, number in numbers.items():
        writer.add_key_value(f"one.{kind.name}", number, kind)
        writer.add_key_value(f"list.{kind.name}", [number] * 3, kinds.ARRAY, sub_type=kind)
    writer.add_string("text", 'naïve – 模型 \N{GRINNING FACE} "quoted"\n')
    writer.add_array("list.STRING", ["a", "ü", ""])
    writer.add_array("long.STRING", [f"token {n}" for n in range(1000)])
    writer.add_array("long.INT32", list(range(5000)))
    writer.add_string("config", json.dumps({"hidden_size": 64, "name": "test"}))
    finish(writer)


def shapes() -> None:
    """Tensors whose stored shape is not their true one."""
    writer = begun("shapes.gguf")
    floats = np.arange(6 * 64, dtype=np.float32)
    writer.add_array("comfy.gguf.orig_shape.first.weight", [48, 8])
    writer.add_tensor("first.weight", floats.reshape(2, 192))
    writer.add_array("comfy.gguf.orig_shape.img_in.weight", [3, 2, 64])
    writer.add_tensor("img_in.weight", floats.reshape(6, 64))
    writer.add_array("comfy.gguf.orig_shape.same.weight", [6, 64])
    writer.add_tensor("same.weight", floats.reshape(6, 64))
    writer.add_array("comfy.gguf.orig_shape.nobody", [1])
    rows = np.sin(np.arange(64 * 64, dtype=np.float32)).reshape(64, 64)
    blocks = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("lin.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    pad = noise(2 * 3840, 7).view(np.uint16)
    writer.add_tensor("x_pad_token", pad.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    finish(writer)


def layouts() -> None:
    """Another alignment, version 2, no tensors, a scalar and an empty tensor, a split model."""
    writer = begun("aligned.gguf")
    writer.add_custom_alignment(256)
    for index in range(5):
        writer.add_tensor(f"t{index}", np.full(index * 7 + 1, index, dtype=np.int16))
    finish(writer)
    writer = begun("version2.gguf")
    writer.add_tensor("a", np.arange(8, dtype=np.float64))
    finish(writer)
    data = bytearray((HERE / "version2.gguf").read_bytes())
    struct.pack_into("<I", data, 4, 2)
    (HERE / "version2.gguf").write_bytes(data)
    writer = begun("vocabulary.gguf")
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "</s>"])
    finish(writer)
    writer = begun("split.gguf", split_max_tensors=2)
    for index in range(5):
        writer.add_tensor(f"blk.{index}.w", np.full((3, 4), index, dtype=np.float32))
    finish(writer)


def big_endian() -> None:
    """A file for machines of the other byte order, which is refused."""
    writer = begun("big_endian.gguf", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("a", np.arange(4, dtype=np.float32))
    finish(writer)


def write(name: str, described_files: object) -> None:
    """Keeps a description."""
    text = json.dumps(described_files, indent=1, ensure_ascii=False, sort_keys=True)
    (HERE / name).write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Makes what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", nargs=2, metavar=("FILE", "NAME"))
    real = parser.parse_args().real
    if real:
        found = described(Path(real[0]))
        found["tensors"] = [
            [t["name"], t["type"], t["shape"], t["start"], t["bytes"], t["crc"]] for t in found["tensors"]
        ]
        text = json.dumps(found["tensors"], ensure_ascii=False).replace("], [", "],\n[")
        del found["tensors"]
        head = json.dumps(found, ensure_ascii=False, sort_keys=True, indent=1)
        (HERE / f"{real[1]}.json").write_text(f'{{"head": {head},\n"tensors": {text}}}\n', encoding="utf-8")
        return
    for old in HERE.glob("*.gguf"):
        old.unlink()
    for make in (types, values, shapes, layouts, big_endian):
        make()
    good = sorted(path for path in HERE.glob("*.gguf") if path.name != "big_endian.gguf")
    write("expected.json", {path.name: described(path) for path in good})


if __name__ == "__main__":
    main()
