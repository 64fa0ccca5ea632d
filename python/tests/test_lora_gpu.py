"""Adapters on a GPU: what merged weights compute, resident and streamed, in captured graphs and in compiled blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lora_models import KINDS, Adapter, Model, adapter, inputs, merged, model, whole_differences

import weightstream
from weightstream import offload
from weightstream.adapters.state import state_of

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 4e-2}
"""Of PyTorch's products, which may use TF32."""


def run(made: torch.nn.Module, *args: Any) -> torch.Tensor:
    with torch.inference_mode():
        return made(*args)


def check(got: torch.Tensor, wanted: torch.Tensor) -> None:
    apart = (got.double().cpu() - wanted).abs().max() / wanted.abs().max()
    assert got.is_cuda and float(apart) < TOLERANCE[got.dtype], float(apart)


def scaled(blocks: int = 4) -> Model:
    """Weights of which a few blocks do not fit into the smallest pages of a GPU."""
    made = model("f32", blocks)
    for block in made.blocks:
        block.ballast = torch.nn.Parameter(torch.zeros(8 << 20), requires_grad=False)
        block.forward = weighed(block, block.forward)
    return made


def weighed(block: torch.nn.Module, forward: Any) -> Any:
    def call(x: torch.Tensor) -> torch.Tensor:
        return forward(x) + block.ballast[0]

    return call


@pytest.mark.parametrize("base", ["f32", "bf16", "fp8", "int8", "gguf"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_on_every_weight(kind: str, base: str, tmp_path: Path) -> None:
    made, x, given = model(base), inputs(), adapter(kind)
    wanted = [run(merged(made, (given, multiplier)), x) for multiplier in (1.0, 0.3, 0.0)]
    path = given.write(tmp_path / "a.safetensors")
    made.cuda()
    plain = run(made, x.cuda())
    assert offload.load_loras_into_model(made, path, [[1.0, 0.3, 0.0]]) == [path], made._loras_errors
    for step, expected in enumerate(wanted):
        offload.set_step_no_for_lora(made, step)
        check(run(made, x.cuda()), expected)
    offload.unload_loras_from_model(made)
    assert torch.equal(run(made, x.cuda()), plain)


def large(made: Model, rank: int, seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    tensors, changes = {}, {}
    for number in range(len(made.blocks)):
        down = torch.randn(rank, 32, generator=generator) * 0.02
        up = torch.randn(64, rank, generator=generator) * 0.02
        start = f"blocks.{number}.up"
        tensors.update({f"{start}.lora_A.weight": down, f"{start}.lora_B.weight": up})
        delta = up.double() @ down.double()
        changes[f"{start}.weight"] = lambda weight, multiplier, delta=delta: weight + multiplier * delta
    return Adapter(tensors, changes)


@pytest.mark.parametrize("streams", [False, True])
def test_a_streamed_model_with_adapters_that_fit_and_that_do_not(streams: bool, tmp_path: Path) -> None:
    made, x = scaled(6), inputs()
    files = [large(made, 8192 if streams else 16, 0), whole_differences()]
    paths = [one.write(tmp_path / f"{number}.safetensors") for number, one in enumerate(files)]
    plain64 = model("f32", 6)
    wanted = [run(merged(plain64, (files[0], value), (files[1], 0.5)), x) for value in (1.0, 0.25, 0.0)]
    with weightstream.attach(made, device="cuda", budget="50MiB" if streams else "120MiB") as attachment:
        before = attachment._runtime.offloader.budget()
        assert offload.load_loras_into_model(made, paths, [[1.0, 0.25, 0.0], 0.5], pinnedLora=True) == paths
        assert bool(state_of(made)._settled._companies) is streams
        assert attachment._runtime.offloader.budget() < before
        for step in (0, 0, 0, 1, 2, 0, 1):
            offload.set_step_no_for_lora(made, step)
            check(run(made, x.cuda()), wanted[step])
        offload.unload_loras_from_model(made)
        assert attachment._runtime.offloader.budget() == before
        check(run(made, x.cuda()), run(merged(plain64), x))


def test_a_captured_graph_sees_new_multipliers(tmp_path: Path) -> None:
    made, x = model("bf16"), inputs().cuda()
    files = [adapter("lora"), adapter("lokr", 1), adapter("conv", 2), adapter("dora", 3), whole_differences()]
    paths = [one.write(tmp_path / f"{number}.safetensors") for number, one in enumerate(files)]
    # What is at zero when the graph is captured is in it all the same.
    values = ((0.0, 0.5, 0.2, 0.0, 0.0), (0.1, 1.0, 0.7, 0.5, 0.3), (0.9, 0.0, 0.4, 0.0, 0.6))
    wanted = [run(merged(made, *zip(files, step)), x.cpu()) for step in values]
    made.cuda()
    offload.load_loras_into_model(made, paths, [list(steps) for steps in zip(*values)])
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(3):
            made(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            output = made(x)
        for step in (0, 1, 2, 0):
            offload.set_step_no_for_lora(made, step)
            graph.replay()
            stream.synchronize()
            check(output, wanted[step])


def test_compiled_blocks_see_new_multipliers(tmp_path: Path) -> None:
    made, x = model("bf16"), inputs()
    files = [adapter("lora"), adapter("dora", 1)]
    paths = [one.write(tmp_path / f"{number}.safetensors") for number, one in enumerate(files)]
    wanted = [run(merged(made, (files[0], one), (files[1], two)), x) for one, two in ((1.0, 0.5), (0.2, 0.0))]
    made.cuda()
    offload.load_loras_into_model(made, paths, [[1.0, 0.2], [0.5, 0.0]])
    for block in made.blocks:
        block.compile()
    for step in (0, 1, 0, 1):
        offload.set_step_no_for_lora(made, step)
        check(run(made, x.cuda()), wanted[step])


def test_a_thousand_changes_take_no_device_memory(tmp_path: Path) -> None:
    made, x = model("bf16"), inputs().cuda()
    files = [adapter(kind).write(tmp_path / f"{kind}.safetensors") for kind in ("lora", "dora", "lokr")]
    made.cuda()
    offload.load_loras_into_model(made, files)
    for number in range(1010):
        offload.activate_loras(made, [0, 1, 2], [number % 7 / 7, [number % 5 / 5, 0.3], 1 - number % 3 / 3])
        if number % 100 == 5:
            run(made, x)
        if number == 10:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
