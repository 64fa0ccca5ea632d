"""Lets the tests import the tools as they import each other: by their folders. One thread: two would fight."""

import pathlib
import sys

import torch

TOOLS = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOOLS / name) for name in ("bench", "demo", "gpu")]
torch.set_num_threads(1)
