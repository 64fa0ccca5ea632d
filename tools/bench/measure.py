"""How things are measured: memory of this process and of the device, the link, and steps that alternate."""

import statistics
import threading
import time

import place
import torch

PIECE = 64 << 20


class AnonymousMemory:
    """Watches this process's anonymous memory (RssAnon) in a thread, and keeps the peak."""

    def __init__(self, interval=0.02):
        self.peak = 0
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _watch(self):
        while True:
            self.peak = max(self.peak, resident_anonymous())
            if self._stop.wait(self._interval):
                return


def resident_anonymous():
    """Anonymous memory of this process now, in bytes."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0


class DeviceMemory:
    """Device memory taken since it was made, PyTorch's own cache left out."""

    def __init__(self):
        self._before = self._outside_torch()

    @staticmethod
    def _outside_torch():
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    def used(self):
        """Bytes taken since."""
        return self._outside_torch() - self._before


def link_rate(rounds=24):
    """Bytes a second from page-locked host memory to the device, in pieces of 64 MiB."""
    source = place.page_locked(PIECE)
    target = torch.empty(PIECE, dtype=torch.uint8, device=place.TENSORS)
    rates = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(rounds * PIECE / (time.perf_counter() - start))
    return max(rates)


def timed(step, prepare=None):
    """Seconds to submit a step, and seconds until it has run; the device is idle before, but for what `prepare` submits."""
    torch.cuda.synchronize()
    if prepare is not None:
        prepare()
    start = time.perf_counter()
    result = step()
    submitted = time.perf_counter()
    torch.cuda.synchronize()
    return submitted - start, time.perf_counter() - start, result


def pairs(ours, resident, count):
    """`count` times: our step (after one untimed step, so that it starts in the state that a step leaves) and the
    resident step. Gives (submit, total) of each."""
    found = []
    for _ in range(count):
        ours()
        mine = timed(ours)[:2]
        resident()
        found.append((mine, timed(resident)[:2]))
    return found


def quartiles(values):
    """First quartile, median and third quartile."""
    if len(values) < 2:
        return [values[0]] * 3
    return statistics.quantiles(values, n=4, method="inclusive")
