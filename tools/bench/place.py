"""Where the bench measures: the first GPU. Tests put the CPU and the emulator in its place."""

import torch

# Of tensors, and of streamed weights.
TENSORS = WEIGHTS = "cuda:0"


def page_locked(size):
    """Bytes in host memory that copies need not go through a buffer for."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
