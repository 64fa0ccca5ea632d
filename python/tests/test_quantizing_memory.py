"""What quantizing on the fly takes of memory: one layer beyond the model, whether it is in memory or being loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

LAYERS, WIDTH = 16, 2048
LAYER = WIDTH * WIDTH * 2  # bytes of one, in bf16
SLACK = 20 << 20  # of threads, of code that was not loaded before, and of what an allocator keeps

MEASURE = """
import sys
from pathlib import Path
import torch
from torch import nn
from weightstream import offload

layers, width, way, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]

def memory(key):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)) << 10

def model(count, device="cpu"):
    return nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16, device=device) for _ in range(count)))

offload.quantize(model(1))  # what the first call takes is no layer's
made = model(layers, "meta" if way == "file" else "cpu")
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
if way == "file":
    offload.load_model_data(made, path, do_quantize=True)
else:
    offload.quantize(made)
print(memory("VmHWM") - before, memory("VmRSS") - before)
"""


def measured(way: str, path: Path) -> tuple[int, int]:
    """How far memory rose, and where it was in the end, beside the beginning."""
    words = [sys.executable, "-c", MEASURE, str(LAYERS), str(WIDTH), way, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    peak, end = map(int, done.stdout.split()[-2:])
    return peak, end


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_model_in_memory_is_quantized_within_one_layer_more(tmp_path: Path) -> None:
    peak, end = measured("memory", tmp_path / "model.safetensors")
    assert peak <= LAYER + SLACK  # all layers at once would take 64 MiB more
    assert end <= -LAYERS * LAYER // 2 + SLACK


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_is_quantized_within_the_result_and_one_layer_more(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    weight = torch.randn(WIDTH, WIDTH).bfloat16()
    safetensors.torch.save_file({f"{layer}.weight": weight.clone() for layer in range(LAYERS)}, path)
    peak, end = measured("file", path)
    # Pages of the file are read and not shown, so that they are not the process's.
    assert peak <= LAYERS * LAYER // 2 + LAYER + SLACK
    assert end >= LAYERS * LAYER // 2
