#!/usr/bin/env python3
"""Writes the hostile and the odd but legal files beside it, byte by byte, with no library that could be wrong the same way.

    python3 make.py            write all of them
    python3 make.py --check    fail if a file is missing, differs, or is not made here

`refused` holds files that must be refused, each with a message of its own; `accepted` files that must be read; `index` a
folder for each index that is wrong, or wrong about what is there.
"""

import json
import struct
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
MADE = {}
TYPES = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


def keep(path, content):
    """Takes note of a file."""
    assert path not in MADE, path
    MADE[path] = content


def data(count):
    """Bytes that count up."""
    return bytes(i % 251 for i in range(count))


def raw(header, body=b"", length=None):
    """A file with this header, whatever it is."""
    if isinstance(header, str):
        header = header.encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + body


def entry(name, dtype, shape, start, end):
    """The text of one tensor's entry."""
    fields = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    return json.dumps(name) + ":" + json.dumps(fields, separators=(",", ":"))


def model(*tensors, metadata=None, body=None, pad=""):
    """A file of (name, dtype, shape, start, end) entries in the given order."""
    parts = [] if metadata is None else ['"__metadata__":' + metadata]
    parts += [entry(*tensor) for tensor in tensors]
    size = max((tensor[4] for tensor in tensors), default=0) if body is None else body
    return raw("{" + ",".join(parts) + "}" + pad, data(size))


def one(fields, body=4, name='"t"'):
    """A file with one tensor of this text."""
    return raw("{" + name + ":{" + fields + "}}", data(body))


GOOD = model(("a", "F32", [2, 3], 0, 24), ("b", "I16", [5], 24, 34))
SMALL = '"dtype":"F32","shape":[1],"data_offsets":[0,4]'


def refused(name, content):
    """A file that must be refused."""
    keep(f"refused/{name}.safetensors", content)


def accepted(name, content):
    """A file that must be read."""
    keep(f"accepted/{name}.safetensors", content)


def lengths():
    """The eight bytes before the header, and where the file ends."""
    refused("empty", b"")
    refused("seven-bytes", GOOD[:7])
    refused("only-a-length", struct.pack("<Q", 60))
    refused("length-zero", raw(""))
    refused("length-past-end", raw("{}", length=1000))
    refused("length-of-whole-file", struct.pack("<Q", len(GOOD)) + GOOD[8:])
    refused("length-over-cap", raw("{}", length=100_000_001))
    refused("length-2-to-63", raw("{}", length=1 << 63))
    refused("length-all-ones", raw("{}", length=(1 << 64) - 1))
    refused("cut-in-header", GOOD[:40])
    refused("cut-in-last-tensor", GOOD[:-2])
    refused("cut-in-first-tensor", GOOD[:-30])
    refused("four-bytes-more", GOOD + b"\0" * 4)
    refused("a-page-more", GOOD + b"\0" * 4096)
    refused("archive-behind", GOOD + b"PK\x05\x06" + b"\0" * 18)


def foreign():
    """Files that are something else."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 4976698672\n".format("0123456789abcdef" * 4)
    refused("lfs-pointer", pointer.encode())
    refused("lfs-pointer-without-size", pointer.split("size")[0].encode())
    refused("web-page", b"<!DOCTYPE html>\n<html><head><title>Not found</title></head><body>404</body></html>\n")
    refused("server-error", b'{"error":"Repository not found"}\n')
    refused("zip-archive", b"PK\x03\x04" + b"\0" * 60)
    refused("pickle", b"\x80\x02}q\x00." + b"\0" * 20)
    refused("plain-text", b"Entry not found, please try again later\n")


def text():
    """Headers that are no JSON, or not quite."""
    refused("not-utf8", raw(b'{"a\xff":1}'))
    refused("not-utf8-value", raw(b'{"__metadata__":{"a":"\xc3\x28"}}'))
    refused("not-utf8-outside-strings", raw(b"{\xff}"))
    refused("not-json", raw("this is a header"))
    refused("a-list", raw("[]"))
    refused("a-string", raw('"{}"'))
    refused("byte-order-mark", raw(b"\xef\xbb\xbf{}"))
    refused("zero-filled", raw("{}" + "\0" * 6))
    refused("json-behind-json", raw("{}{}"))
    refused("text-behind-json", raw("{} x"))
    refused("unclosed", raw("{"))
    refused("unclosed-string", raw('{"a'))
    refused("comma-at-end", raw("{" + entry("t", "F32", [1], 0, 4) + ",}", data(4)))
    refused("no-comma", raw("{" + entry("a", "U8", [1], 0, 1) + entry("b", "U8", [1], 1, 2) + "}", data(2)))
    refused("no-colon", raw('{"a" {}}'))
    refused("bare-key", raw("{a:1}"))
    refused("lone-surrogate", raw('{"\\ud83d":{' + SMALL + "}}", data(4)))
    refused("surrogates-reversed", raw('{"\\ude00\\ud83d":{' + SMALL + "}}", data(4)))
    refused("unknown-escape", raw('{"\\x41":{' + SMALL + "}}", data(4)))
    refused("bad-hexadecimal", raw('{"\\u00g1":{' + SMALL + "}}", data(4)))
    refused("control-character", raw('{"a\nb":{' + SMALL + "}}", data(4)))
    refused("deep-nesting", one(SMALL + ',"x":' + "[" * 200 + "]" * 200))
    refused("number-beyond-double", one(SMALL + ',"x":1e999'))
    refused("number-too-long", one(SMALL + ',"x":' + "1" * 200))
    refused("number-with-leading-zero", one('"dtype":"F32","shape":[01],"data_offsets":[0,4]'))
    refused("half-a-word", one(SMALL + ',"x":nul'))
    refused("not-a-number", one(SMALL + ',"x":NaN'))
    refused("long-name", model(("n" * 1025, "F32", [1], 0, 4)))


def fields():
    """Tensors that are not described as they must be."""
    refused("tensor-is-null", raw('{"t":null}'))
    refused("tensor-is-a-list", raw('{"t":["F32",[1],[0,4]]}', data(4)))
    refused("no-dtype", one('"shape":[1],"data_offsets":[0,4]'))
    refused("no-shape", one('"dtype":"F32","data_offsets":[0,4]'))
    refused("no-offsets", one('"dtype":"F32","shape":[1]'))
    refused("two-dtypes", one('"dtype":"F32",' + SMALL))
    refused("two-shapes", one('"shape":[1],' + SMALL))
    refused("two-offsets", one('"data_offsets":[0,4],' + SMALL))
    refused("unknown-dtype", one('"dtype":"F31","shape":[1],"data_offsets":[0,4]'))
    refused("lower-case-dtype", one('"dtype":"f32","shape":[1],"data_offsets":[0,4]'))
    refused("dtype-is-a-number", one('"dtype":17,"shape":[1],"data_offsets":[0,4]'))
    refused("dtype-is-an-object", one('"dtype":{"F32":null},"shape":[1],"data_offsets":[0,4]'))
    refused("shape-is-a-number", one('"dtype":"F32","shape":1,"data_offsets":[0,4]'))
    refused("dimension-negative", one('"dtype":"F32","shape":[-1],"data_offsets":[0,4]'))
    refused("dimension-minus-zero", one('"dtype":"F32","shape":[-0],"data_offsets":[0,0]', 0))
    refused("dimension-fraction", one('"dtype":"F32","shape":[1.0],"data_offsets":[0,4]'))
    refused("dimension-exponent", one('"dtype":"F32","shape":[1e0],"data_offsets":[0,4]'))
    refused("dimension-true", one('"dtype":"F32","shape":[true],"data_offsets":[0,4]'))
    refused("dimension-text", one('"dtype":"F32","shape":["1"],"data_offsets":[0,4]'))
    refused("dimension-2-to-64", one('"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,4]'))
    refused("dimension-beyond-signed", one('"dtype":"F32","shape":[0,18446744073709551615],"data_offsets":[0,0]', 0))
    refused("many-dimensions", model(("t", "F32", [1] * 2000, 0, 4)))
    refused("offset-negative", one('"dtype":"F32","shape":[1],"data_offsets":[-4,0]'))
    refused("offset-2-to-64", one('"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551616]'))
    refused("one-offset", one('"dtype":"F32","shape":[1],"data_offsets":[0]'))
    refused("three-offsets", one('"dtype":"F32","shape":[1],"data_offsets":[0,4,4]'))
    refused("offsets-are-text", one('"dtype":"F32","shape":[1],"data_offsets":"0,4"'))


def layout():
    """Tensors that do not cover the data exactly."""
    refused("starts-late", model(("a", "F32", [1], 4, 8)))
    refused("gap", model(("a", "U8", [4], 0, 4), ("b", "U8", [4], 6, 10)))
    refused("overlap", model(("a", "U8", [4], 0, 4), ("b", "U8", [4], 2, 6)))
    refused("same-range", model(*((f"t{i}", "U8", [4], 0, 4) for i in range(100))))
    refused("reversed", model(("a", "U8", [4], 4, 0), body=4))
    refused("past-end", model(("a", "U8", [4], 0, 4), ("b", "U8", [1 << 40], 4, 4 + (1 << 40)), body=8))
    refused("past-end-at-64-bits", model(("a", "U8", [(1 << 60)], 0, 1 << 60), body=8))
    refused("too-few-bytes", model(("a", "F32", [2, 2], 0, 12)))
    refused("too-many-bytes", model(("a", "F32", [2, 2], 0, 20)))
    refused("scalar-of-nothing", model(("a", "F32", [], 0, 0)))
    refused("elements-overflow", model(("a", "F32", [1 << 32, 1 << 32], 0, 4)))
    refused("bits-overflow", model(("a", "F64", [1 << 60], 0, 4)))
    refused("overflow-before-zero", model(("a", "U8", [(1 << 62), 4, 0], 0, 0)))
    refused("odd-f4", model(("a", "F4", [3], 0, 2)))
    refused("odd-f6", model(("a", "F6_E2M3", [3], 0, 3)))
    refused("empty-out-of-place", model(("a", "U8", [8], 0, 8), ("z", "U8", [0], 4, 4)))


def names():
    """Names that come twice, and metadata."""
    twice = '"dtype":"U8","shape":[1],"data_offsets":'
    refused("name-twice", raw('{"a":{' + twice + '[0,1]},"a":{' + twice + "[1,2]}}", data(2)))
    refused("name-twice-escaped", raw('{"ab":{' + twice + '[0,1]},"\\u0061b":{' + twice + "[1,2]}}", data(2)))
    other = '"dtype":"I8","shape":[1],"data_offsets":[0,1]'
    refused("name-twice-same-range", raw('{"c":{' + twice + '[0,1]},"c":{' + other + "}}", data(1)))
    refused("metadata-twice", raw('{"__metadata__":{},"__metadata__":{}}'))
    refused("metadata-key-twice", raw('{"__metadata__":{"k":"1","\\u006b":"2"}}'))
    refused("metadata-number", raw('{"__metadata__":{"step":12}}'))
    refused("metadata-null-value", raw('{"__metadata__":{"none":null}}'))
    refused("metadata-is-text", raw('{"__metadata__":"pt"}'))
    refused("metadata-is-a-tensor", raw('{"__metadata__":{"shape":[1],"dtype":"F32","data_offsets":[0,4]}}', data(4)))


def legal():
    """Odd files that the format allows."""
    accepted("no-tensors", raw("{}"))
    accepted("spaces-before", raw("   " + "{" + entry("t", "F32", [1], 0, 4) + "}", data(4)))
    accepted("spaces-behind", model(("t", "F32", [1], 0, 4), pad=" " * 40))
    accepted("metadata-null", model(("t", "F32", [1], 0, 4), metadata="null"))
    accepted("metadata-last", raw("{" + entry("t", "U8", [1], 0, 1) + ',"__metadata__":{"format":"pt"}}', data(1)))
    accepted("unknown-fields", one(SMALL + ',"strides":[1],"note":{"a":[null,true,-1.5e3,"\\u00e9"]}'))
    accepted("header-order", model(("c", "U8", [2], 8, 10), ("a", "F32", [1], 4, 8), ("b", "I16", [2], 0, 4)))
    odd = ["", "a\0b", "../../x", "/etc/passwd", "C:\\x", "\u00e9\U0001f600", "a\nb", '"', "__METADATA__"]
    accepted("odd-names", model(*((name, "U8", [1], i, i + 1) for i, name in enumerate(odd))))
    accepted("scalar-and-rank-8", model(("s", "F32", [], 0, 4), ("r", "U8", [1, 2, 1, 3, 1, 1, 2, 1], 4, 16)))
    ends, at = [], 0
    for dtype, bits in TYPES.items():
        ends.append((f"t.{dtype}", dtype, [2, 4], at, at + bits))
        at += bits
    accepted("all-types", model(*ends))
    first, zero, second = ("a", "U8", [4], 0, 4), ("z", "F32", [0, 9], 4, 4), ("b", "U8", [4], 4, 8)
    accepted("empty-between", model(first, zero, second))
    accepted("empty-between-listed-last", model(first, second, zero))
    accepted("empty-huge", model(("z", "F64", [0, 1 << 62, 1 << 62], 0, 0)))
    shifted = [("u8", "U8", [3], 0, 3), ("f32", "F32", [5], 3, 23), ("bf16", "BF16", [7], 23, 37)]
    shifted += [("f8", "F8_E4M3", [1], 37, 38), ("i64", "I64", [2], 38, 54), ("f16", "F16", [0], 54, 54)]
    pad = (6 - (len(model(*shifted)) - 54)) % 8
    accepted("misaligned-header", model(*shifted, pad=" " * pad))
    aligned = [("u8", "U8", [1], 0, 1), ("f32", "F32", [16, 16], 1, 1025)]
    accepted("misaligned-behind-a-byte", model(*aligned, pad=" " * (-(len(model(*aligned)) - 1025) % 8)))


def indexes():
    """Folders with an index that is wrong, or wrong about what is there."""
    shard = {
        "a": model(("k1", "BF16", [2], 0, 4), ("k2", "BF16", [2], 4, 8)),
        "b": model(("k3", "BF16", [2], 0, 4), ("k4", "BF16", [2], 4, 8)),
        "c": model(("k5", "BF16", [2], 0, 4), ("k6", "BF16", [2], 4, 8)),
    }
    where = {f"k{i}": f"{'aabbcc'[i - 1]}.safetensors" for i in range(1, 7)}
    usual = "model.safetensors.index.json"

    def case(name, weight_map=None, files="abc", index=usual, text=None, extra=()):
        if text is None:
            text = json.dumps({"metadata": {"total_size": 24}, "weight_map": where if weight_map is None else weight_map})
        keep(f"index/{name}/{index}", text.encode())
        for letter in files:
            keep(f"index/{name}/{letter}.safetensors", shard[letter])
        for file, content in extra:
            keep(f"index/{name}/{file}", content)

    case("good")
    case("good-diffusers", index="diffusion_pytorch_model.safetensors.index.json")
    case("one-file-missing", files="ac")
    case("all-files-missing", files="")
    copy = model(*((f"k{i}", "I8", [2], 2 * i - 2, 2 * i) for i in range(1, 7)))
    case("stray-copy", extra=[("model.safetensors", copy)])
    lacks = model(("k6", "BF16", [2], 0, 4))
    case("tensor-not-in-its-file", files="ab", extra=[("c.safetensors", lacks)])
    case("tensor-in-another-file", weight_map=where | {"k5": "a.safetensors"})
    both = model(("k3", "BF16", [2], 0, 4), ("k4", "BF16", [2], 4, 8), ("k5", "BF16", [2], 8, 12))
    case("tensor-in-two-files", files="ac", extra=[("b.safetensors", both)])
    case("no-weight-map", text='{"metadata":{"total_size":24}}')
    case("weight-map-is-a-list", text='{"weight_map":["a.safetensors"]}')
    case("weight-map-is-empty", weight_map={})
    case("weight-map-of-numbers", weight_map={"k1": 1})
    case("parent-folder", weight_map={"k1": "../x.safetensors"})
    case("absolute-path", weight_map={"k1": "/etc/passwd"})
    case("sub-folder", weight_map={"k1": "sub/a.safetensors"})
    case("windows-path", weight_map={"k1": "..\\a.safetensors"})
    case("drive", weight_map={"k1": "C:a.safetensors"})
    case("zero-byte", weight_map={"k1": "a\0.safetensors"})
    case("no-name", weight_map={"k1": ""})
    case("the-folder-itself", weight_map={"k1": ".."})
    case("tensor-twice", text='{"weight_map":{"k1":"a.safetensors","\\u006b1":"b.safetensors"}}')
    case("cut", text=json.dumps({"weight_map": where})[:60])
    case("empty-index", text="")
    case("web-page", text="<!DOCTYPE html><html></html>\n")
    second = json.dumps({"weight_map": {"k1": "a.safetensors"}}).encode()
    case("two-indexes", extra=[("diffusion_pytorch_model.safetensors.index.json", second)])
    case("damaged-file", files="ab", extra=[("c.safetensors", shard["c"][:-3])])
    case("wrong-total", text=json.dumps({"metadata": {"total_size": 48}, "weight_map": where}))


def main():
    """Writes or checks."""
    for part in (lengths, foreign, text, fields, layout, names, legal, indexes):
        part()
    folders = [HERE / name for name in ("refused", "accepted", "index")]
    there = {p.relative_to(HERE).as_posix() for folder in folders for p in folder.rglob("*") if p.is_file()}
    if "--check" in sys.argv[1:]:
        wrong = sorted(there ^ MADE.keys())
        wrong += [path for path, content in MADE.items() if path in there and (HERE / path).read_bytes() != content]
        for path in wrong:
            print(f"differs: {path}")
        return 1 if wrong else 0
    for path in there - MADE.keys():
        (HERE / path).unlink()
    for path, content in MADE.items():
        (HERE / path).parent.mkdir(parents=True, exist_ok=True)
        (HERE / path).write_bytes(content)
    print(f"{len(MADE)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
