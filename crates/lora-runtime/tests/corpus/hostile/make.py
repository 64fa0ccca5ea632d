"""Makes the files beside it: adapters that no trainer wrote, for the layers in `tests/hostile.rs`. Needs nothing but Python."""

from __future__ import annotations

import json
import math
import pathlib
import struct

HERE = pathlib.Path(__file__).parent
SIZES = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1, "F64": 8, "U8": 1, "I64": 8}
DOWN, UP = ("F32", [4, 16]), ("F32", [16, 4])


def write(name: str, tensors: dict, metadata: dict | None = None, values: dict | None = None) -> None:
    header, data = {}, b""
    for key, (dtype, shape) in tensors.items():
        size = SIZES[dtype] * math.prod(shape)
        own = (values or {}).get(key, b"\0" * size)
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
        data += own
    if metadata:
        header["__metadata__"] = metadata
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    (HERE / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def pair(name: str, down=DOWN, up=UP) -> dict:
    return {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}


def alpha(name: str, value: float) -> None:
    key = "blocks.0.q.alpha"
    write(name, pair("blocks.0.q") | {key: ("F32", [])}, values={key: struct.pack("<f", value)})


def main() -> None:
    q = "blocks.0.q"
    write("huge_rank", pair(q, ("F32", [1 << 61, 0]), ("F32", [0, 1 << 61])))
    write("rank_0", pair(q, ("F32", [0, 16]), ("F32", [16, 0])))
    write("ranks_differ", pair(q, ("F32", [4, 16]), ("F32", [16, 5])))
    write("inputs_differ", pair(q, ("F32", [4, 17])))
    write("outputs_differ", pair(q, up=("F32", [17, 4])))
    write("transposed", pair(q, ("F32", [16, 4]), ("F32", [4, 16])))
    write("no_dimension", pair(q, ("F32", []), ("F32", [])))
    write(
        "many_dimensions", pair(q, ("F32", [4, 16] + [1] * 62)) | {f"{q}.lora_mid.weight": ("F32", [4, 4] + [1] * 60)}
    )
    write("half_a", {f"{q}.lora_A.weight": DOWN})
    write("half_b", {f"{q}.lora_B.weight": UP})
    write("half_of_many", pair("blocks.0.k") | {f"{q}.lora_B.weight": UP})
    write("lone_alpha", {f"{q}.alpha": ("F32", [])})
    write("lone_bias", {f"{q}.lora_B.bias": ("F32", [16])})
    write("lone_magnitude", {f"{q}.dora_scale": ("F32", [16])})
    alpha("alpha_nan", math.nan)
    alpha("alpha_infinite", -math.inf)
    write("alpha_vector", pair(q) | {f"{q}.alpha": ("F32", [16])})
    write("integers", pair(q, ("I8", [4, 16]), ("I8", [16, 4])))
    write("twice", pair(q) | pair("lora_unet_blocks_0_q"))
    write("two_adapters", {f"{q}.lora_A.a.weight": DOWN, f"{q}.lora_B.b.weight": UP})
    write("two_kinds", pair(q) | {f"{q}.lokr_w1": ("F32", [4, 4]), f"{q}.lokr_w2": ("F32", [4, 4])})
    write("two_scopes", pair("blocks.0.to_k") | pair("blocks.0.kv", up=("F32", [32, 4])))
    write("no_name", {"lora_A.weight": DOWN, ".lora_B.weight": UP, "": ("F32", [1]), "....": ("F32", [1])})
    write("prefixes_only", pair("model." * 100) | pair("lora_unet_" * 50))
    write("other_letters", pair("blöcke.0.q") | pair("blocks.０.q") | pair("blocks.0.q\u200b\u0000"))
    write("long_names", pair("a." * 400 + "q") | pair("_" * 900 + q))
    write("many_numbers", pair(".".join(["0"] * 400)))
    write("set_weight", {f"{q}.set_weight": ("F32", [16, 16])})
    write("quantized_factor", pair(q) | {f"{q}.lora_A.weight_scale": ("F32", [])})
    write("kronecker_overflow", {f"{q}.lokr_w1": ("F32", [1 << 62, 0]), f"{q}.lokr_w2": ("F32", [0, 1 << 62])})
    write("blocks_of_0", {f"{q}.oft_blocks": ("F32", [1 << 40, 0, 0])})
    write("butterfly_too_deep", {f"{q}.oft_blocks": ("F32", [9, 4, 4, 4])})
    write("butterfly_of_odd_blocks", {f"{q}.oft_blocks": ("F32", [2, 16, 1, 1])})
    deep = {"lora_adapter_metadata": "[" * 50000, "transformer.r": "9" * 60, "lora_alpha": "1e999"}
    write("deep_metadata", pair(q), deep)
    write("every_field", pair(q), {f"{n}.lora_alpha": str(n) for n in range(2000)})


if __name__ == "__main__":
    main()
