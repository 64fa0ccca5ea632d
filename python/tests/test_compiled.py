"""Compiled models: the engine stays outside their graphs, and watching a step leaves the compiler's caches alone."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from attach_models import Towered, attached, inputs, mlp, run, same_bits, transformer
from torch import nn

import weightstream
from weightstream.compiled import COMPILES

needs_compiled = pytest.mark.skipif(not COMPILES, reason="before PyTorch 2.6 the compiler copies modules")


class Counting:
    """A backend that runs graphs as they are and counts the runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable:
        def call(*args: torch.Tensor) -> object:
            self.runs += 1
            return graph.forward(*args)

        return call

    def during(self, model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        before = self.runs
        return run(model, x), self.runs - before


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(model: Towered, backend: Counting) -> nn.Module:
    return torch.compile(model, backend=backend)


def in_place(model: Towered, backend: Counting) -> nn.Module:
    model.compile(backend=backend)
    return model


def blocks(model: Towered, backend: Counting) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def replaced_blocks(model: Towered, backend: Counting) -> nn.Module:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend)
    return model


WAYS = [whole, in_place, blocks, replaced_blocks]


@needs_compiled
@pytest.mark.parametrize("ran_before", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_graphs_run_again_after_the_first_step(way: Callable, ran_before: bool) -> None:
    backend, x = Counting(), inputs()
    model = mlp()
    expected = run(model, x)
    compiled = way(model, backend)
    if ran_before:
        assert same_bits(run(compiled, x), expected)
    with attached(model, 0.5) as attachment, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same_bits(run(compiled, x), expected)
        for _ in range(3):
            result, runs = backend.during(compiled, x)
            assert same_bits(result, expected)
            assert runs >= len(model.blocks)
        assert attachment.stats()["steps"] == 4 and attachment.stats()["copies"] > 0
        assert set(attachment.report()["segments"].values()) <= {1}
    result, runs = backend.during(compiled, x)
    assert same_bits(result, expected) and runs > 0
    other = Counting()
    result, runs = other.during(way(mlp(), other), x)
    assert same_bits(result, expected) and runs > 0


@needs_compiled
def test_a_compiled_wrapper_is_attached() -> None:
    backend, x = Counting(), inputs()
    model = mlp()
    expected = run(model, x)
    compiled = torch.compile(model, backend=backend)
    with attached(compiled, 0.5) as attachment:
        for _ in range(4):
            assert same_bits(run(compiled, x), expected)
        assert attachment.stats()["steps"] == 4
        assert backend.during(compiled, x)[1] >= len(model.blocks)
    assert "forward" not in model.__dict__
    assert same_bits(run(compiled, x), expected)
    assert same_bits(run(model, x), expected)


@needs_compiled
@pytest.mark.parametrize("way", WAYS)
def test_compiled_after_the_first_steps(way: Callable) -> None:
    backend, x = Counting(), inputs()
    model = transformer()
    expected = run(model, x)
    with attached(model, 0.6) as attachment:
        for _ in range(2):
            assert same_bits(run(model, x), expected)
        assert max(attachment.report()["segments"].values()) > 1
        compiled = way(model, backend)
        for _ in range(4):
            assert same_bits(run(compiled, x), expected)
        result, runs = backend.during(compiled, x)
        assert same_bits(result, expected) and len(model.blocks) <= runs
        assert set(attachment.report()["segments"].values()) <= {1}
    assert same_bits(run(compiled, x), expected)


@needs_compiled
@pytest.mark.parametrize("way", WAYS)
def test_freezing_is_refused(way: Callable) -> None:
    import torch._inductor.config

    x = inputs()
    model = mlp()
    expected = run(model, x)
    compiled = way(model, Counting())
    with attached(model, 0.5):
        with torch._inductor.config.patch(freezing=True):
            with pytest.raises(weightstream.StateError, match="freezing"):
                run(compiled, x)
        assert same_bits(run(compiled, x), expected)


@needs_compiled
def test_a_block_compiled_alone_is_not_frozen() -> None:
    import torch._inductor.config

    model = mlp()
    alone = torch.compile(model.blocks[2], backend="eager")
    with attached(model, 0.5), torch.inference_mode(), torch._inductor.config.patch(freezing=True):
        with pytest.raises(weightstream.StateError, match="freezing"):
            alone(torch.ones(1, 64))


@needs_compiled
def test_the_compiler_is_on_again_after_a_failed_step() -> None:
    backend, x = Counting(), inputs()
    model = mlp()
    expected = run(model, x)
    compiled = torch.compile(model, backend=backend)
    with attached(model, 0.5):
        with pytest.raises(RuntimeError):
            run(compiled, torch.ones(1, 3))
        for _ in range(2):
            assert same_bits(run(compiled, x), expected)
        assert backend.during(compiled, x)[1] > 0


@pytest.mark.skipif(COMPILES, reason="this version compiles attached models")
@pytest.mark.parametrize("way", WAYS)
def test_older_compilers_are_kept_away(way: Callable) -> None:
    backend, x = Counting(), inputs()
    model = mlp()
    expected = run(model, x)
    compiled = way(model, backend)
    if way is not whole:
        with pytest.raises(weightstream.ModelError, match="is compiled"):
            weightstream.attach(model, device="host")
    else:
        with attached(model, 0.5):
            for _ in range(3):
                assert same_bits(run(compiled, x), expected)
    assert same_bits(run(compiled, x), expected)


def test_an_attached_model_does_not_load_the_compiler() -> None:
    code = """
import sys, torch, weightstream
from torch import nn
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(5)])
with torch.no_grad(), weightstream.attach(model, device="host"):
    for _ in range(3):
        model(torch.ones(1, 64))
assert "torch._dynamo" not in sys.modules and "torch._inductor.config" not in sys.modules
"""
    if getattr(sys.modules["weightstream"], "__file__", None) is None:
        pytest.skip("needs the installed package in a process of its own")
    subprocess.run([sys.executable, "-c", code], check=True)
