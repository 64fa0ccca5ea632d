"""Adapters in compiled models, and multipliers that change often: no new code, no new tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attach_models import host, run, weight_bytes
from lora_models import adapter, assert_close, inputs, merged, model

import weightstream
from weightstream import offload
from weightstream.compiled import COMPILES

needs_compiled = pytest.mark.skipif(not COMPILES, reason="before PyTorch 2.6 the compiler copies modules")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, _: Any) -> Any:
        self.graphs += 1
        return graph.forward


@needs_compiled
@pytest.mark.parametrize(
    ("kind", "base"),
    [
        ("lora", "int8"),
        ("dora", "f32"),
        ("dora by column", "int8"),
        ("lokr", "f32"),
        ("oft", "f32"),
        ("conv", "f32"),
        ("peft oft", "f32"),
        ("peft boft", "f32"),
        ("ia3 of inputs", "int8"),
        ("ia3 of outputs", "f32"),
        ("glora", "int8"),
        ("conv glora", "f32"),
    ],
)
def test_blocks_compile_whole_and_multipliers_recompile_nothing(kind: str, base: str, tmp_path: Path) -> None:
    made, x, backend = model(base, blocks=2), inputs(), Counting()
    given = adapter(kind, blocks=range(2))
    plain = run(made, x)
    path = given.write(tmp_path / "a.safetensors")
    offload.load_loras_into_model(made, path, [[0.5, 0.25, 0.0, 1.0]])
    for block in made.blocks:
        block.compile(backend=backend, fullgraph=True)
    graphs = None
    for step, multiplier in enumerate((0.5, 0.25, 0.0, 1.0)):
        offload.set_step_no_for_lora(made, step)
        assert_close(run(made, x), run(merged(made, (given, multiplier)), x), plain)
        graphs = graphs or backend.graphs
        assert backend.graphs == graphs
    for number in range(20):
        offload.activate_loras(made, [0], [number / 20])
        run(made, x)
    assert backend.graphs == graphs and graphs > 0


@needs_compiled
def test_a_compiled_model_that_streams(tmp_path: Path) -> None:
    made, x, backend = model(blocks=4), inputs(), Counting()
    given, other = adapter("lora"), adapter("conv", 1)
    paths = [one.write(tmp_path / f"{number}.safetensors") for number, one in enumerate((given, other))]
    wanted = [run(merged(made, (given, 0.5), (other, value)), x) for value in (1.0, 0.0, 0.25)]
    for block in made.blocks:
        block.compile(backend=backend)
    with weightstream.attach(made, device=host(), budget=int(weight_bytes(made) * 0.9)):
        offload.load_loras_into_model(made, paths, [0.5, [1.0, 0.0, 0.25]])
        run(made, x)
        for step in (0, 0, 1, 2, 0):
            offload.set_step_no_for_lora(made, step)
            assert_close(run(made, x), wanted[step], torch.zeros(0))
        graphs = backend.graphs
        for step in (0, 1, 2) * 3:
            offload.set_step_no_for_lora(made, step)
            assert_close(run(made, x), wanted[step], torch.zeros(0))
        assert backend.graphs == graphs > 0


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("attach", [False, True])
def test_a_thousand_changes_leave_no_tensor_behind(attach: bool, tmp_path: Path) -> None:
    made, x = model(blocks=2), inputs()
    files = [
        adapter(kind, blocks=range(2)).write(tmp_path / f"{kind}.safetensors") for kind in ("lora", "dora", "lokr")
    ]
    attachment = weightstream.attach(made, device=host(), budget=int(weight_bytes(made) * 0.9)) if attach else None
    offload.load_loras_into_model(made, files, [1.0, 1.0, 1.0])

    def change(number: int) -> None:
        offload.activate_loras(made, [0, 1, 2], [number % 7 / 7, [number % 5 / 5, 0.3], 1 - number % 3 / 3])
        offload.set_step_no_for_lora(made, number % 4)

    for number in range(20):
        change(number)
        run(made, x)
    before = tensors_alive()
    pointers = [vector.data_ptr() for vector in _vectors(made)]
    for number in range(1000):
        change(number)
        if number % 100 == 0:
            run(made, x)
    assert tensors_alive() <= before
    assert [vector.data_ptr() for vector in _vectors(made)] == pointers
    if attachment is not None:
        attachment.detach()


def _vectors(made: Any) -> list[torch.Tensor]:
    from weightstream.adapters.state import state_of

    return list(state_of(made)._built.strengths._vectors.values())
