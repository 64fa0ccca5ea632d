"""Weights in memory: how many bytes there are, how they are aligned, and how fast they can be copied."""

import time

import torch

# PyTorch's allocators, and a streamed model's addresses, are multiples of this.
ALIGNMENT = 512
PIECE = 64 << 20


def weight_bytes(model):
    """Bytes of all parameters, shared ones once."""
    seen = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    return sum(seen.values())


def align_weights(model):
    """Gives every parameter aligned storage of its own, keeping ties.

    Weights mapped from a file lie at any multiple of 8 bytes, for which kernels may choose another order of additions;
    "identical" means identical to the same weights in aligned memory.
    """
    moved = {}
    for parameter in model.parameters():
        key = (parameter.data_ptr(), parameter.shape)
        if key not in moved:
            moved[key] = _aligned_copy(parameter.data)
        parameter.data = moved[key]


def _aligned_copy(tensor):
    room = torch.empty(tensor.nbytes + ALIGNMENT, dtype=torch.uint8)
    start = -room.data_ptr() % ALIGNMENT
    copy = room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def link_rate(device, rounds=8):
    """Bytes a second from host memory to the device: pinned memory to a GPU, a plain copy on the emulator."""
    cuda = device.startswith("cuda")
    source = torch.zeros(PIECE, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty(PIECE, dtype=torch.uint8, device=device if cuda else "cpu")
    best = 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if cuda:
            torch.cuda.synchronize(device)
        best = max(best, PIECE / (time.perf_counter() - start))
    return best
