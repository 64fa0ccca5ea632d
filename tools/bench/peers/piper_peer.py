"""Adapters for piper-offload 0.2 (from its repository) and 0.9 (its package)."""

from __future__ import annotations
import __future__

import ctypes.util
import importlib
import importlib.abc
import os
import sys
import types

import torch
from torch import nn

from .common import Attached, as_device, owner_of, plain_mode, plan, prepare, split_blocks


def _find_package_dir(name: str) -> str | None:
    env = os.environ.get("PEERS_PIPER_PATH")
    for root in ([env] if env else []) + sys.path:
        path = os.path.join(root or ".", name)
        if os.path.isfile(os.path.join(path, "__init__.py")):
            return path
    return None


def _load_piper():
    """Import piper_offload, on an older Python than it declares if need be.

    shim. It declares Python >= 3.14 and torch 2.13. Its source has no 3.14 syntax
    but relies on deferred annotations and on ctypes.util.dllist; compiling it with
    the ``annotations`` future flag and supplying dllist is enough for its pinned,
    resident and whole-block streaming paths. Its "rolling" mode needs an inductor
    class that torch 2.11 lacks, so on such a torch that one module is stubbed.
    Results obtained this way must be labelled as an unsupported combination.
    """
    if "piper_offload" in sys.modules:
        return sys.modules["piper_offload"]
    if sys.version_info >= (3, 14):
        return importlib.import_module("piper_offload")

    base = _find_package_dir("piper_offload")
    if base is None:
        raise ModuleNotFoundError("piper_offload not found; set PEERS_PIPER_PATH to the folder holding it")

    if not hasattr(ctypes.util, "dllist"):

        def dllist():
            with open("/proc/self/maps") as maps:
                paths = [line.split(None, 5)[5].strip() for line in maps if line.count("/")]
            return list(dict.fromkeys(p for p in paths if p.startswith("/")))

        ctypes.util.dllist = dllist

    class Loader(importlib.abc.SourceLoader):
        def __init__(self, path):
            self.path = path

        def get_filename(self, fullname):
            return self.path

        def get_data(self, path):
            with open(path, "rb") as f:
                return f.read()

        def source_to_code(self, data, path, *, _optimize=-1):
            return compile(
                data,
                path,
                "exec",
                dont_inherit=True,
                optimize=_optimize,
                flags=__future__.annotations.compiler_flag,
            )

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname, path=None, target=None):
            if fullname.split(".")[0] != "piper_offload":
                return None
            stem = os.path.join(base, *fullname.split(".")[1:])
            if os.path.isdir(stem):
                init = os.path.join(stem, "__init__.py")
                return importlib.util.spec_from_file_location(
                    fullname, init, loader=Loader(init), submodule_search_locations=[stem]
                )
            if os.path.isfile(stem + ".py"):
                return importlib.util.spec_from_file_location(fullname, stem + ".py", loader=Loader(stem + ".py"))
            return None

    sys.meta_path.insert(0, Finder())
    if os.path.isfile(os.path.join(base, "rolling_compile.py")):
        passes = importlib.import_module("torch._inductor.custom_graph_pass")
        if not hasattr(passes, "CustomInferenceAwareGraphPass"):
            stub = types.ModuleType("piper_offload.rolling_compile")

            def unavailable(*_a, **_k):
                raise NotImplementedError("piper-offload's rolling mode needs torch 2.13")

            stub.register_rolling_target = unavailable
            stub.unregister_rolling_target = unavailable
            stub.rolling_inductor_backend = unavailable
            sys.modules["piper_offload.rolling_compile"] = stub
    return importlib.import_module("piper_offload")


@plain_mode
def attach_piper(
    model,
    device,
    resident_bytes=None,
    *,
    blocks_attr="blocks",
    split=False,
    prefetch=2,
    block_mode="streaming",
    block_compile=None,
):
    """ModelOffloader streaming ``blocks_attr``.

    0.2.x: 1 resident block and ``slots - 1`` prefetch slots (more resident blocks
    do not cut traffic: its eviction is LRU over a sequential scan).
    0.9.x: two slots, fixed; the budget is ignored. ``split=True`` keeps blocks on
    the GPU as ordinary non-block state, which both versions hold resident.
    """
    piper = _load_piper()
    new = not hasattr(piper, "StreamConfig")
    dev = as_device(device)
    prepare(model)
    staging = 2 if new else 1 + prefetch
    p = plan(model, resident_bytes, blocks_attr=blocks_attr, staging_blocks=staging)
    kept: list[int] = []
    path = blocks_attr
    if split and 0 < p["resident_blocks"] < p["blocks"]:
        path, kept = split_blocks(model, torch.device("cpu"), p["resident_blocks"], blocks_attr)
        owner, leaf = owner_of(model, blocks_attr)
        # Registered, so that piper manages them as always-resident state.
        owner._resident_blocks = nn.ModuleList([getattr(owner, leaf)[i] for i in kept])
    if new:
        off = piper.ModelOffloader.from_module(
            model, block_paths=[path], block_mode=block_mode, block_compile=block_compile
        )
        off.activate(dev)
        version = "0.9"
    else:
        off = piper.ModelOffloader.from_module(model, blocks_attr=[path], block_compile=block_compile)
        ahead = prefetch if (kept or resident_bytes is None) else max(1, p["slots"] - 1)
        off.activate(
            dev,
            stream_config=piper.StreamConfig(num_resident_blocks=1, num_prefetch_blocks=ahead, cyclic=True),
        )
        version = "0.2"
    info = {
        **p,
        "resident_blocks": len(kept),
        "budget": "emulated" if kept else ("ignored" if new else "native"),
        "api": version,
        "unsupported_stack": sys.version_info < (3, 14),
    }
    return Attached("piper", off.value, info=info, warmup_calls=2, close=off.deactivate, keep=off)


@plain_mode
def attach_piper_split(model, device, resident_bytes, *, blocks_attr="blocks", **kw):
    return attach_piper(model, device, resident_bytes, blocks_attr=blocks_attr, split=True, **kw)
