"""The compiled module: a thin mirror of the Rust facade. Converts, decides nothing; the package around it is the API.

Every function may raise the classes of `weightstream.errors`. Sizes and addresses are in bytes. Tensor, block and unit
numbers count from zero in the order in which they were described. `stream` is a raw CUDA stream pointer, and 0 on the
emulator.
"""

from typing import Any, final

__version__: str

def parse_bytes(size: int | str) -> int:
    """Bytes in a number or a text like "512MiB"; `BudgetError` for zero, less, or what cannot be read."""

@final
class Device:
    """A device's driver, opened."""

    @staticmethod
    def cuda(ordinal: int) -> Device:
        """CUDA device `ordinal` through libcuda, or `DeviceError` that says why not."""
    @staticmethod
    def host(bytes: int, granularity: int, bandwidth: int | None, order: str, seed: int) -> Device:
        """An emulated device."""
    @property
    def kind(self) -> str:
        """"cuda" or "host"."""
    @property
    def ordinal(self) -> int:
        """Which one, as the driver numbers them."""
    @property
    def name(self) -> str:
        """Its name as the driver gives it."""
    @property
    def total_memory(self) -> int:
        """All of its memory."""
    @property
    def granularity(self) -> int:
        """The smallest piece physical memory comes in."""
    def free_memory(self) -> int:
        """What is free now, other processes counted."""

@final
class Plan:
    """A model planned and not started: takes the host bytes, then starts."""

    def __init__(
        self,
        device: Device,
        tensors: list[tuple[str, int]],
        base: list[int],
        towers: list[tuple[str, list[tuple[str, list[int]]]]],
        budget: int | str | None,
        look_ahead: int | None,
        poison: bool,
    ) -> None:
        """Names and sizes of all tensors, which of them are base, and the towers' blocks with theirs."""
    def source(self, tensors: list[tuple[int, int, int, object]]) -> list[tuple[int, Any]]:
        """Hands over tensors as (number, address, size, keep-alive object).

        Gives for each where its bytes live from now on: the same address and None if in place, else the address in a
        slab and a DLPack capsule of it; the keep-alive object is then already released.
        """
    def start(self) -> Offloader:
        """Maps the addresses and uploads what is resident. Once; every tensor must have been handed over."""

@final
class Offloader:
    """A model being streamed. One thread at a time enters it; the others get `StateError`."""

    def address(self, tensor: int) -> int:
        """The tensor's device address for life."""
    def capsule(self, tensor: int) -> Any:
        """A DLPack capsule of exactly the tensor's bytes on the device; keeps the address range alive."""
    def unit_of(self, tensor: int) -> int | None:
        """The unit the tensor streams with now; None if all of its bytes are resident."""
    def begin_step(self, stream: int) -> None:
        """Starts a step, and resets what a lost exit left open in the one before."""
    def end_step(self, stream: int) -> None:
        """Ends a step."""
    def enter(self, unit: int, stream: int) -> None:
        """Makes the unit's bytes present for what `stream` does next."""
    def leave(self, unit: int, stream: int) -> None:
        """Says that what `stream` holds now is the unit's last use."""
    def abandon_step(self) -> None:
        """Gives up a step whose thread will not end it: the next step waits for all work and starts over."""
    def segment(self, cuts: dict[int, list[int]], order: list[int] | None, everywhere: bool) -> list[int]:
        """Cuts blocks into segments between steps, where that makes a step faster.

        `cuts` gives for a block the tensors at which a segment may start. `order` gives one step's visits of the segments
        that all cuts would make, numbered block by block. The answer is, for each of those, the unit it is part of from
        now on.
        """
    def predict(self, cuts: dict[int, list[int]], order: list[int] | None) -> float:
        """The seconds a step is predicted to take with what `segment` would choose; for comparing cuts."""
    def time_next_step(self) -> None:
        """Measures on the device what each visit of the next step computes. Costs two events a visit, once."""
    def learn_pace(self) -> bool:
        """Whether that step has been measured; `segment` and `predict` go by it from then on. Never waits."""
    def gain(self, cuts: dict[int, list[int]], order: list[int] | None) -> tuple[float, float, float] | None:
        """Seconds a step takes now, seconds it would take after `segment` with these cuts, and what that takes once.

        None if no step of this plan and order was measured.
        """
    def hold(self, tensors: list[int], stream: int) -> Hold:
        """Makes tensors present until the hold is released, whatever the budget's plan says about their turn."""
    def stats(self) -> str:
        """Counters, as JSON."""
    def report(self) -> str:
        """The plan and what memory is in use, as JSON."""
    def close(self) -> None:
        """Waits for everything submitted, releases device memory and unlocks host memory. Idempotent."""

@final
class Hold:
    """Tensors kept present out of turn."""

    def release(self, stream: int) -> None:
        """Lets them go, once what `stream` holds now has run. Idempotent."""
