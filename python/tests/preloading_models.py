"""Allocations as a memory pool makes them, for the tests of preloading."""

from __future__ import annotations

import ctypes

from weightstream import _native


class Allocated:
    """Allocates in a block's forward through the functions that a memory pool calls."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.library = ctypes.CDLL(_native.__file__)
        self.library.weightstream_allocate.restype = ctypes.c_void_p
        self.library.weightstream_allocate.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.library.weightstream_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.addresses: list[tuple[int, int]] = []

    def allocate(self, size: int) -> bool:
        address = self.library.weightstream_allocate(size, self.number, None)
        if address:
            ctypes.memset(address, 0xAB, size)
            self.addresses.append((address, size))
        return bool(address)

    def free(self) -> None:
        while self.addresses:
            address, size = self.addresses.pop()
            assert ctypes.string_at(address, size) == b"\xab" * size, "weights do not lie in allocations"
            self.library.weightstream_free(address, size, self.number, None)
