"""Ctrl-C during a load: it ends soon, in the loading thread, with nothing changed and no thread left."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import torch
from offload_files import empty, small
from torch import nn

from weightstream import offload

SCRIPT = """
    import os, signal, sys, time
    import torch
    from torch import nn
    from weightstream import offload
    from weightstream.offload import progress

    torch.set_num_threads(1)
    # What a shell starts in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(3)])
    threads = len(os.listdir("/proc/self/task"))
    progress._POLL_SECONDS = 0.0
    phases = []
    polls = []

    def polled():
        polls.extend(phases[-1:])
        if polls.count("Applying Weights") == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return False

    try:
        with offload.loading_context(offload.LoadingCallback(polled, lambda phase, *_: phases.append(phase))):
            offload.load_model_data(model, sys.argv[1])
    except KeyboardInterrupt:
        assert phases[-1] == "Applying Weights", phases
        assert all(parameter.is_meta for parameter in model.parameters())
        print("interrupted")
    # A thread that has ended may be listed for a moment.
    deadline = time.monotonic() + 30
    while len(os.listdir("/proc/self/task")) > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) == threads
"""


def test_an_interrupt_ends_a_conversion(tmp_path: Path) -> None:
    torch.manual_seed(0)
    offload.save_model(
        nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(3)]), tmp_path / "x.safetensors"
    )
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "x.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "interrupted\n"


def test_loads_give_back_everything(tmp_path: Path) -> None:
    offload.save_model(small(), tmp_path / "x.safetensors")
    torch.save(small().state_dict(), tmp_path / "z.pt")

    def round_trip() -> None:
        offload.load_model_data(empty(), tmp_path / "x.safetensors")
        offload.load_sd(tmp_path / "z.pt")

    def state() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text().count(str(tmp_path))
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps

    round_trip()
    gc.collect()  # what earlier tests left may hold files too
    before = state()
    for _ in range(20):
        round_trip()
    gc.collect()
    assert state() == before
