"""A resident model with the waits, records and copies of a streamed one, made by PyTorch alone.

What these cost the host is the share of a streamed step that is the driver's and PyTorch's: no library that orders copies
by events can do without them.
"""

import functools

import place
import torch

# Units that are copied ahead of the one that computes.
AHEAD = 2


def add(model, visits, streamed):
    """Puts as many turns around parts of the model's blocks as a streamed step has `visits`, one each at least.

    Each waits for its copy, and then orders another of its share of the `streamed` bytes behind itself. Gives their number.
    """
    most = max(1, round(visits / len(model.blocks)))
    parts = [part for block in model.blocks for part in (block.a, block.x, block.f1, block.f2)[:most]]
    queue = Queue(len(parts), max(1, int(streamed / visits)))
    for number, part in enumerate(parts):
        part.forward = queue.turn(number, part.forward)
    return len(parts)


class Queue:
    """A stream of copies, and two events for each turn."""

    def __init__(self, turns, size):
        self._copies = torch.cuda.Stream()
        self._source = place.page_locked(size)
        self._target = torch.empty(size, dtype=torch.uint8, device=place.TENSORS)
        self._copied = [torch.cuda.Event() for _ in range(turns)]
        self._used = [torch.cuda.Event() for _ in range(turns)]

    def turn(self, number, inner):
        """The forward `inner` with two waits, two records and one copy."""
        copies, source, target = self._copies, self._source, self._target
        mine, used = self._copied[number], self._used[number]
        later = self._copied[(number + AHEAD) % len(self._copied)]

        @functools.wraps(inner)
        def forward(*args, **kwargs):
            compute = torch.cuda.current_stream()
            compute.wait_event(mine)
            result = inner(*args, **kwargs)
            used.record(compute)
            copies.wait_event(used)
            with torch.cuda.stream(copies):
                target.copy_(source, non_blocking=True)
            later.record(copies)
            return result

        return forward
