"""Formats of quantized weights: those that are built in, and an application's own.

    from weightstream import quant_router

    quant_router.register_handler("my_app.formats.my_fp4")          # a module, its import path, or any object like one
    quant_router.register_file_extension("bin4", my_reader)

A handler is a module with

    detect(state_dict, verboseLevel, metadata)          -> {"matched": bool, "kind": str, "details": dict}
    convert_to_quanto(state_dict, default_dtype, verboseLevel, detection, metadata)
                                                        -> {"state_dict": dict, "quant_map": dict}

and, if it wants, HANDLER_NAME, HANDLER_PRIORITY (1000; smaller goes first), `apply_pre_quantization`,
`split_fused_weights`, `detect_quantization_kind_for_file`, `detect_quantization_label_from_filename`, its own types (objects
with a `name`), and one class of linear layers that has `qcreate`. `detect` is shown tensors without data.

Handlers and the built-in formats are one list by priority. Where several recognise a module, the best one has it; among
equals, the built-in one. A handler with the name of a built-in one takes its place.
"""

from __future__ import annotations

from .asking import detect, detect_quantization_kind_for_file, detect_quantization_label_from_filename
from .registry import (
    handlers,
    register_file_extension,
    register_handler,
    unregister_file_extension,
    unregister_handler,
)

__all__ = [
    "detect",
    "detect_quantization_kind_for_file",
    "detect_quantization_label_from_filename",
    "handlers",
    "register_file_extension",
    "register_handler",
    "unregister_file_extension",
    "unregister_handler",
]
