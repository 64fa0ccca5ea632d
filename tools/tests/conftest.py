"""Lets the tests import the tools as they import each other: by their folders. One thread: two would fight."""

import pathlib
import sys
import types

import pytest
import torch

TOOLS = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOOLS / name) for name in ("bench", "demo", "gpu")]
torch.set_num_threads(1)


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine whose GPU is the CPU and the emulator, and a bench model that it can hold."""
    import dit
    import measure
    import place
    import weightstream

    monkeypatch.setattr(place, "TENSORS", "cpu")
    device = weightstream.HostDevice(bytes="64MiB", granularity=4096, order="random", poison=True)
    monkeypatch.setattr(place, "WEIGHTS", device)
    monkeypatch.setattr(place, "page_locked", lambda size: torch.empty(size, dtype=torch.uint8))
    faked = {
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (1 << 30, 2 << 30),
        "memory_reserved": lambda: 0,
        "get_device_name": lambda device=None: "none",
        "get_device_properties": lambda index: types.SimpleNamespace(name="none", total_memory=2 << 30),
    }
    for name, value in faked.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(measure, "PIECE", 1 << 10)
    monkeypatch.setattr(dit, "TEXT", 8)
    monkeypatch.setattr(dit, "SIZE", {"dim": 64, "feed": 160, "heads": 4})
