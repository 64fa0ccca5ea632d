"""The compiled module: a thin mirror of the Rust facade. Converts, decides nothing; the package around it is the API.

Every function may raise the classes of `weightstream.errors`. Sizes and addresses are in bytes. Tensor, block and unit
numbers count from zero in the order in which they were described. `stream` is a raw CUDA stream pointer, and 0 on the
emulator.
"""

from collections.abc import Callable
from typing import Any, final

__version__: str

def parse_bytes(size: int | str) -> int:
    """Bytes in a number or a text like "512MiB"; `BudgetError` for zero, less, or what cannot be read."""

def save(
    path: str,
    tensors: list[tuple[str, str, list[int], int, int]],
    metadata: dict[str, str],
    watch: Callable[[int], object] | None,
) -> None:
    """Writes a safetensors file, whole or not at all, from tensors in CPU memory: name, type as files spell it, shape,
    address, bytes. `watch` is called often with the bytes written; what it raises stops it."""

def mapped(address: int, size: int) -> tuple[str, int] | None:
    """The file and offset behind these bytes, if all of them lie in one file mapped by `Checkpoint.map`."""

def check_mapped(tensors: list[tuple[str, int, int]]) -> None:
    """Raises CheckpointError if the file behind one of these, name, address and bytes, has changed since it was mapped."""

def read_mapped(name: str, address: int, size: int, target: int) -> bool:
    """Copies such bytes to `target`: from the file, and from memory where they were changed. False if they are of no
    mapped file; then nothing is done. A file that was cut is an error that names `name`."""

def profile_folder() -> str:
    """The folder of named profiles, by `DDO_PROFILE_DIR` and the home folder as they are now; ProfileError without both."""

def profile_key(identity: str) -> str:
    """The hash of an identity, a JSON object; a record's file is this with `.json`."""

def profile_load(folder: str, identity: str) -> tuple[str | None, list[str]]:
    """The record as JSON, with the entries that are understood, and what was wrong with its file. Fails for no file."""

def profile_update(folder: str, identity: str, change: Callable[[str], str]) -> tuple[str | None, list[str]]:
    """Under the folder's lock: `change` gets the record as JSON and answers the entries to put, null for those to remove.
    What it raises leaves the file as it was. The answer is the record that was written, and what was wrong before."""

@final
class Checkpoint:
    """The files of one model, opened once, their headers read."""

    @staticmethod
    def open(paths: list[str], *, allow_trailing: bool = False, exact: bool = False) -> Checkpoint:
        """Opens what the paths stand for as one model: safetensors and GGUF files, an index, one of several shards, a
        folder. `exact` opens the files that are named and nothing that their names stand for."""
    def entries(self) -> list[tuple[str, str, list[int], int, int, int]]:
        """All tensors: name, type as the format spells it, shape, number of the file, offset in it, bytes."""
    def metadata(self) -> list[dict[str, str]]:
        """Each file's metadata."""
    def files(self) -> list[str]:
        """The paths of the files."""
    def notes(self) -> list[str]:
        """What was read past or left out, in words."""
    def map(self, name: str) -> Any:
        """A DLPack capsule of a tensor's bytes in a private mapping of its file: writes stay in this process."""
    def read(
        self,
        targets: list[tuple[str, int, int]],
        watch: Callable[[int], object] | None = None,
        *,
        io: str = "auto",
    ) -> str:
        """Reads whole tensors into memory: name, address, bytes. `watch` is called often with the bytes read so far; what
        it raises stops the reads. The answer says how it was done, as JSON."""

def quant_handlers() -> list[tuple[str, int]]:
    """The handlers of quantized formats: name and priority, in the order in which they are asked."""

def quant_claims(
    tensors: list[tuple[str, str, list[int]]],
    metadata: dict[str, str],
    read: Callable[[str], bytes],
    without: list[str],
) -> dict[str, tuple[str, int]]:
    """The weights that handlers recognise, with the name and priority of the one that takes each. Describes none."""

def quant_detect(
    tensors: list[tuple[str, str, list[int]]],
    metadata: dict[str, str],
    read: Callable[[str], bytes],
    without: list[str],
) -> tuple[list[tuple[QuantWeight, str]], list[str], list[str]]:
    """The quantized weights of a model with their handlers' names, tensors that are hints, and notes.

    Tensors are names, types as files spell them, and shapes; `read` gives the bytes of a small one. Handlers in `without`
    are not asked. QuantizationError, naming the layer, for what is not understood.
    """

@final
class QuantWeight:
    """What a quantized weight is and which tensors are its parts. Equal by value; copies and pickles."""

    @staticmethod
    def from_json(text: str) -> QuantWeight:
        """What `to_json` wrote; QuantizationError if it cannot be read."""
    def to_json(self) -> str:
        """All of it, as text."""
    @property
    def name(self) -> str:
        """The name that the weight has in a model without quantization."""
    @property
    def shape(self) -> list[int]:
        """Its logical shape."""
    @property
    def format(self) -> str:
        """How it is packed, in words."""
    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale; 2**64 - 1 for all there are."""
    @property
    def rows(self) -> int:
        """Rows of the logical matrix: all dimensions but the last."""
    @property
    def columns(self) -> int:
        """Elements of a row."""
    @property
    def parts(self) -> list[tuple[str, str, str, list[int]]]:
        """Its tensors: role, name, type as files spell it, shape."""
    @property
    def transforms(self) -> list[tuple[str, int]]:
        """What happens to inputs first, in order: ("Hadamard", columns of a group), ("Multiply", 0)."""
    def renamed(self, name: str, tensors: dict[str, str]) -> QuantWeight:
        """The same weight under other names."""
    def with_shape(self, shape: list[int]) -> QuantWeight:
        """The same weight in another shape, where its format allows it."""
    def dequantize(
        self, parts: dict[str, tuple[int, int]], ranges: list[tuple[int, int]], out: int, size: int, dtype: str
    ) -> None:
        """Writes rows, one range after the other, as "F32", "BF16" or "F16" into `size` bytes at `out`, with all threads and
        without the interpreter. `parts` are addresses and bytes in CPU memory, by the tensors' names."""

@final
class Quantizer:
    """A weight of floats to be quantized: what it will be, and how."""

    def __init__(self, name: str, shape: list[int], number: str, kind: str) -> None:
        """A weight of "F32", "F16" or "BF16" for one of optimum-quanto's types: "qint8", "qfloat8", "qfloat8_e5m2", "qint4",
        "qint2". QuantizationError, naming it, if there is no such weight."""
    @property
    def weight(self) -> QuantWeight:
        """What it becomes, its parts named as quanto names them."""
    def quantize(
        self,
        source: tuple[int, int],
        rows: tuple[int, int],
        data: tuple[int, int],
        scale: tuple[int, int],
        shift: tuple[int, int],
    ) -> None:
        """Quantizes some rows, which are at `source`, with all threads and without the interpreter, into their place in the
        memory of the whole weight's parts. All are addresses and bytes in CPU memory."""

@final
class DeviceKernels:
    """Kernels of one CUDA device, which write a weight's numbers there; loaded as they are needed."""

    def __init__(self, ordinal: int) -> None:
        """Those of CUDA device `ordinal`; DeviceError if there is no such device."""
    @staticmethod
    def supports(weight: QuantWeight) -> bool:
        """Whether there is a kernel for this weight."""
    def prepare(self, weight: QuantWeight, dtype: str) -> None:
        """Loads what a weight needs, so that the first `dequantize` does not; some tenths of a second the first time."""
    def dequantize(
        self,
        weight: QuantWeight,
        parts: dict[str, tuple[int, int]],
        rows: tuple[int, int],
        out: int,
        dtype: str,
        stream: int,
    ) -> None:
        """Submits to `stream` what writes rows as "F32", "BF16" or "F16" to the address `out`, which has room for them. `parts` are
        addresses and bytes of contiguous tensors on the device, by their names.

        NotAvailableError, with nothing submitted, where another way has to be taken: no kernel for the weight, a part that
        lies at an odd address, a driver that cannot load the kernels. QuantizationError for parts of other sizes.
        """

def not_finite(tensors: list[tuple[str, int, int]]) -> list[tuple[int, int, bool]]:
    """Of contiguous tensors in CPU memory (type as safetensors spells it, address, bytes), those that hold NaN or infinity: which of
    them, the first such element, and whether that is infinite."""

@final
class AdapterPlan:
    """What an adapter file does to a model. Each key of the file is in one of `applied`, `absent`, `refused` and `skipped`."""

    def __new__(
        cls,
        layers: list[tuple[str, str, list[int], bool]],
        tensors: list[tuple[str, str, list[int]]],
        scalars: dict[str, float],
        metadata: dict[str, str],
        *,
        config: str | None = None,
        split: str | None = None,
        component: str | None = None,
        ignore_variations: bool = False,
    ) -> AdapterPlan:
        """`layers` of the model: name, kind ("linear", "linear_transposed", "conv1d", "conv2d", "conv3d", "norm", "embedding", "parameter",
        "other"), shape of the weight or the parameter, whether it has a bias. `tensors` of the file: key, type as safetensors
        spells it, shape. `scalars` are the values of its tensors of one element. `config` is the text of an
        adapter_config.json, `split` a split_linear_modules_map as JSON, `component` what the pipeline calls this model.
        `ignore_variations` skips layers whose shapes do not fit. ModelError for layers or texts that cannot be read."""
    def targets(self) -> list[AdapterTarget]:
        """What is applied, by layer. With anything in `refused` none of it may be."""
    def applied(self) -> list[str]:
        """The keys that targets use, alphas too."""
    def absent(self) -> list[tuple[str, list[str]]]:
        """Keys of layers that the model does not have, in groups, with a sentence about each."""
    def refused(self) -> list[tuple[str, str]]:
        """Keys that cannot be applied, and why."""
    def skipped(self) -> list[tuple[str, str]]:
        """Keys that are not applied though nothing is refused: absent ones, and those that `ignore_variations` leaves out."""
    def checkpoint(self) -> str | None:
        """A sentence, if the file is no adapter but a model's own weights."""
    def notes(self) -> list[str]:
        """What was ignored, such as fields of the header, and why."""
    def report(self) -> str:
        """All of it in words."""

@final
class AdapterTarget:
    """One adapter on one layer."""

    @property
    def layer(self) -> str:
        """The layer, or the bare parameter, by the model's name."""
    @property
    def kind(self) -> str:
        """ "lora" (DoRA with a part "magnitude"), "loha", "lokr", "oft", "boft", "oft_inputs", "boft_inputs", "oft_vectors", "ia3", "glora", "diff" (of a weight or
        parameter), "diff_bias"."""
    @property
    def parts(self) -> dict[str, tuple[str, int | None, int | None]]:
        """By role, the key of its tensor in the file and which rows of that are used; None for all.

        Roles: "down", "up", "mid", "bias" (added to the outputs of "up", scaled as they are) and "magnitude"; "w1", "w1_a",
        "w1_b", "w2", "w2_a", "w2_b", "t2"; "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"; "blocks",
        "rotations", "rescale", "half_blocks" (also of inputs, with "packed_blocks" and "gain"); "scales"; "input_up",
        "input_down"; "embedding_a", "embedding_b"; "diff". Shapes are the file's: factors of linear layers may have dimensions of 1 behind them.
        """
    @property
    def rows(self) -> tuple[int, int] | None:
        """The rows of the layer that it changes, where it is for a part of a fused layer; None for all."""
    @property
    def columns(self) -> tuple[int, int] | None:
        """As `rows`; always None so far."""
    @property
    def cut(self) -> tuple[int, int] | None:
        """The rows of its own product that the layer gets, where it was made for a fused layer and its parts are not cut
        (LoKr, LoHa with cores): compute kron(w1, w2) of all, and take these. None for all."""
    @property
    def rank(self) -> int:
        """Its rank; rows of a block for rotations, 0 where it has none."""
    @property
    def scale(self) -> float:
        """What its product is multiplied by; 1 for differences. Of a rotation, the bound on its size, 0 for none."""
    @property
    def axis(self) -> int | None:
        """Of a magnitude, and of factors: 0 for one number a row, 1 for one a column."""
    @property
    def series(self) -> int | None:
        """Terms of the series that stands for the inverse in a rotation of inputs; None for the inverse itself."""
    @property
    def constraint(self) -> float | None:
        """How long the matrix of each block may be before its rotation is computed; None for any length."""
    @property
    def transposed(self) -> bool:
        """Whether its difference is laid out as the layer keeps its weight: columns by rows."""
    def merged(
        self,
        weight: tuple[int, int],
        parts: dict[str, tuple[int, int]],
        multiplier: float,
        out: tuple[int, int],
    ) -> None:
        """Writes the layer's whole weight with the adapter merged in, computed on the CPU in f64: for tests, not for speed.

        All are addresses and bytes of contiguous F32 in CPU memory; `parts` are the whole tensors of the file, by role.
        ModelError for other sizes than the plan has, and for an adapter of a bias.
        """
    def merged_bias(
        self, bias: tuple[int, int], parts: dict[str, tuple[int, int]], multiplier: float, out: tuple[int, int]
    ) -> None:
        """The same of the layer's bias, zeros for one that it does not have: of "diff_bias", and of "lora" with a part "bias"."""

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
        """ "cuda" or "host"."""
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
    def occupy(self, bytes: int) -> Occupied:
        """Takes device memory, as activations would; DeviceError if there is not so much."""
    def occupied(self) -> tuple[int, int]:
        """What is taken so now, and the most since this was asked for last."""

@final
class Occupied:
    """Device memory that something else than weights takes, until it is released or dropped."""

    def release(self) -> None:
        """Gives it back. Idempotent."""

def share_reserved(
    models: list[tuple[str, int, list[tuple[int, bool]], int]], share: float, ring: int
) -> tuple[list[tuple[list[bool], bool]], int, int, int]:
    """Shares page-locked RAM between models: `share` of it, 0 for the default, and a ring of `ring` bytes.

    A model is what is wanted of it ("none", "whole", "blocks", "one in" so many, "ring"), that number, its blocks as
    `Plan.blocks` gives them, and the bytes outside. The answer is what of each is locked, the bytes of the ring, all bytes
    locked, and the most that this process may lock.
    """

@final
class Share:
    """A device that several models share: one page pool, one transit ring."""

    def __init__(self, device: Device, largest: int, limit: int) -> None:
        """For models of which the largest has `largest` bytes, and that together take at most `limit`."""
    def report(self) -> str:
        """Which models are on the device and what they take, as JSON."""

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
        lock: int | None,
        place: tuple[Share, str, list[str] | None] | None,
        threads: int | None = None,
    ) -> None:
        """Names and sizes of all tensors, which of them are base, and the towers' blocks with theirs. `lock` is the most
        that may be page-locked in this process, beside staging rings; None for what machine and control group allow.
        `place` is where the model shares its device: the share, its name there, and the names of whom it accepts, None for
        everyone; a budget that is too small is then raised. `threads` is how many copy what cannot be page-locked where it
        is; one a core, at most 16, unless given."""
    def blocks(self) -> list[tuple[int, bool]]:
        """Of each block its bytes, and whether any of them are copied at each step."""
    def raised(self) -> tuple[int, int, str] | None:
        """The budget as it was asked, what it was raised to, and the unit that needs it; None if it was not."""
    def room(self) -> tuple[int, int, int, int]:
        """Bytes of the pages that are always resident, of the largest unit, of a page, and of all weights."""
    def source(
        self,
        tensors: list[tuple[int, int, int, object]],
        watch: Callable[[int], object] | None = None,
        lock: bool = True,
    ) -> list[tuple[int, Any]]:
        """Hands over tensors as (number, address, size, keep-alive object).

        Gives for each where its bytes live from now on: the same address and None if in place, zero and None if they are
        read from the file that `Checkpoint.map` mapped there, else the address in other memory and a DLPack capsule of
        it; the keep-alive object is then already released. `watch` is called often with the bytes page-locked so far;
        what it raises ends the work. Without `lock` they stay where they are and are not page-locked.
        """
    def start(self, watch: Callable[[int], object] | None = None) -> Offloader:
        """Maps the addresses and uploads what is resident. Once; every tensor must have been handed over. `watch` as for
        `source`."""

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
    def trace_next_step(self) -> None:
        """Traces the next step that begins: two events a visit and a copy, once."""
    def take_step_trace(self) -> StartupReport | None:
        """The step that was traced, on the device's clock, once the device has come to its end. Never waits."""
    def learn_pace(self) -> bool:
        """Whether that step has been measured; `segment` and `predict` go by it from then on. Never waits."""
    def gain(self, cuts: dict[int, list[int]], order: list[int] | None) -> tuple[float, float, float] | None:
        """Seconds a step takes now, seconds it would take after `segment` with these cuts, and what that takes once.

        None if no step of this plan and order was measured.
        """
    def budget(self) -> int | None:
        """The device memory that the weights may take, in bytes; None is without limit."""
    def set_budget(self, budget: int | str | None) -> None:
        """Changes it, between steps. Nothing changes if it is refused; what a failing driver leaves, the next step completes."""
    def preloaded(self) -> int:
        """What of the budget is beyond the one that was set, and given back under pressure."""
    def preload(self, limit: int) -> None:
        """Changes the budget to `limit`, but never below the one that was set, between steps."""
    def release_preload(self, bytes: int) -> int:
        """Gives back at least so much of what is preloaded, or all of it, also in the middle of a step of this thread; how much."""
    def hold(self, tensors: list[int], stream: int) -> Hold:
        """Makes tensors present until the hold is released, whatever the budget's plan says about their turn."""
    def is_here(self) -> bool:
        """Whether the model is on the device: always until it is closed, unless it shares the device with others."""
    def arrive(self, stream: int) -> None:
        """Brings a model that shares its device to it, as its next step would."""
    def vacate(self) -> None:
        """Takes a model that shares its device off it until it runs again."""
    def stats(self) -> str:
        """Counters, as JSON."""
    def report(self) -> str:
        """The plan and what memory is in use, as JSON."""
    def close(self) -> None:
        """Waits for everything submitted, releases device memory and unlocks host memory. Idempotent."""

@final
class Allocations:
    """Allocations of one device, for which preloaded weights make room. PyTorch's memory pools make them through the functions
    `weightstream_allocate` and `weightstream_free` of this library."""

    def __init__(self, device: Device) -> None:
        """Those of a device: of a CUDA device always the same."""
    @property
    def number(self) -> int:
        """The number by which the functions know the device."""
    def serve(self, model: Offloader) -> None:
        """A model's preloaded weights make room from now on, until it is closed."""
    def report(self) -> tuple[int, int]:
        """Bytes allocated now, and the most that ever were."""

@final
class Preload:
    """The decisions of preloading one model. Does nothing itself."""

    def __init__(self, most: int, margin: int) -> None:
        """For a model that never takes more than `most`; `margin` is left free besides."""
    def need(self, workload: str) -> int | None:
        """What a workload's step takes, if it is known."""
    def learn(self, workload: str, need: int) -> None:
        """It takes so much."""
    def pressed(self, workload: str, bytes: int) -> int:
        """It took so much more than was known; how much that is."""
    def begin(self, workload: str, free: int, cached: int, budget: int, least: int) -> tuple[int, bool, bool]:
        """Before a step: the budget, whether to measure the step, and whether to ask again once the allocator has given back
        what it keeps. `cached` is what the allocator keeps, `budget` what the weights may take now, at least `least`."""

@final
class Turns:
    """The open turns of one model, and a unit's turn around a forward as one call."""

    open: list[int]
    """Units that are entered, oldest first, and marks below zero, of which -1 is the root's forward."""
    thread: int
    """The thread that opened them. Set by that thread."""

    def __init__(
        self, offloader: Offloader, stream: Callable[[], int] | None, is_grad_enabled: Callable[[], bool]
    ) -> None:
        """`stream` gives the current stream; None stands for the emulator's."""
    def at_root(self) -> bool:
        """Whether the root's forward runs on this thread, and no unit's within it."""
    def take(
        self,
        runtime: Any,
        unit: int,
        name: str,
        inner: Callable[..., Any],
        guarded: list[tuple[dict[str, Any], Callable[..., Any]]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls `inner` in a turn of `unit`, which takes the forwards in `guarded` off their modules while it runs.

        Where the turn is not plainly the next of a running step, `runtime.arrive` says whether it may begin; it is true for
        a call within the unit's own turn, which gets none of its own. `runtime.refuse_grad` sees inputs and output while
        grad is enabled, and `runtime.abandon` the unit after an error.
        """

@final
class Hold:
    """Tensors kept present out of turn."""

    def release(self, stream: int) -> None:
        """Lets them go, once what `stream` holds now has run. Idempotent."""

def resident_fraction(path: str) -> tuple[int, float | None]:
    """The size of a file, and the part of it that lies in the page cache; None where the system does not tell."""

@final
class StartupRecorder:
    """Records phases of a start; whoever begins them keeps their numbers. In a forked child it records nothing."""

    def __init__(self, path: str | None = None, counters: bool = True, rank: int | None = None, name: str = "") -> None:
        """Starts recording. With `path` each event is written there as it happens; TimingError if that cannot be created."""
    def begin(self, name: str, parent: int | None, thread: str, sync: int) -> int | None:
        """Begins a phase, after `sync` nanoseconds of synchronization; None if it is beyond the limits."""
    def end(
        self,
        phase: int,
        error: str | None,
        sync: int,
        counters: dict[str, int | None] | None = None,
        levels: dict[str, tuple[int | None, int | None]] | None = None,
    ) -> None:
        """Ends a phase, with the type of the error that ended it. TimingError if it is not open."""
    def environment(self, facts: str) -> None:
        """Adds facts, as a JSON object."""
    def note(self, text: str) -> None:
        """Adds a note about the recording itself."""
    def now(self) -> int | None:
        """Nanoseconds since the recording began; None if nothing is recorded."""
    def report(self) -> StartupReport | None:
        """The report so far."""
    def finish(self, at: int) -> StartupReport | None:
        """Ends the recording as of a time that `now` gave."""

@final
class StartupReport:
    """A report of startup timings."""

    @staticmethod
    def read(path: str) -> StartupReport:
        """Reads a report, or a recording's file however far it came; TimingError if it is neither."""
    @staticmethod
    def parse(text: str) -> StartupReport:
        """The same of text."""
    @staticmethod
    def merge(paths: list[str]) -> StartupReport:
        """Several processes' files as one report; TimingError if none can be read."""
    def to_json(self) -> str:
        """As JSON."""
    def chrome_trace(self) -> str:
        """As a Chrome trace."""
    def folded_stacks(self) -> str:
        """As folded stacks."""
    def table(self) -> str:
        """As a table."""

def startup_stats(paths: list[str], confidence: float) -> tuple[str, str]:
    """What is typical of runs, as JSON and as a table."""

def startup_diff(before: list[str], after: list[str], confidence: float, threshold: float) -> tuple[str, str]:
    """How two sets of runs differ, as JSON and as a table."""
