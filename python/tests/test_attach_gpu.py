"""The same promises on a GPU: bits, budget, streams, captures, detach."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from attach_models import AttentionBlock, MlpBlock, Towered, assert_same_state, same_bits, snapshot, weight_bytes
from torch import nn

import weightstream
from weightstream import BudgetError, StateError
from weightstream.steps import ModelSteps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use"),
]

DIM = 1024


def model(
    blocks: int = 6, dtype: torch.dtype = torch.bfloat16, kind: type[nn.Module] = MlpBlock, seed: int = 0
) -> Towered:
    """A tower of some 16 MiB a block in bf16."""
    torch.manual_seed(seed)
    return Towered([kind(DIM) for _ in range(blocks)], DIM).to(dtype).eval().requires_grad_(False)


def inputs(dtype: torch.dtype = torch.bfloat16, length: int = 64) -> torch.Tensor:
    """What it takes."""
    return torch.randn(1, length, 8, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()


def resident(made: Towered, x: torch.Tensor) -> torch.Tensor:
    """The output of a copy that lies on the GPU."""
    copied = model(len(made.blocks), x.dtype, type(made.blocks[0]))
    copied.load_state_dict(made.state_dict())
    with torch.inference_mode():
        return copied.cuda()(x)


def run(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The model's output."""
    with torch.inference_mode():
        return made(x)


@pytest.mark.parametrize("kind", [MlpBlock, AttentionBlock])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("share", [0.35, 0.6, 0.9, 2.0])
@pytest.mark.parametrize("everywhere", [False, True])
def test_every_budget_gives_the_same_bits(
    kind: type[nn.Module], dtype: torch.dtype, share: float, everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelSteps, "everywhere", everywhere)
    made, x = model(8, dtype, kind), inputs(dtype)
    expected = resident(made, x)
    before = snapshot(made)
    budget = int(weight_bytes(made) * share)
    with weightstream.attach(made, device="cuda:0", budget=budget) as attachment:
        assert all(p.device == torch.device("cuda:0") for p in made.parameters())
        for _ in range(6):
            assert same_bits(run(made, x).cpu(), expected.cpu())
        report = attachment.report()
        assert report["engine"]["page_bytes_peak"] <= budget
        assert (attachment.stats()["copies"] == 0) == (share > 1)
        assert_same_state(made, before)
    assert all(p.device.type == "cpu" for p in made.parameters())
    assert_same_state(made, before)


def test_auto_takes_the_gpu_and_says_why() -> None:
    made = model(2)
    with weightstream.attach(made) as attachment:
        assert attachment.device.type == "cuda" and "CUDA" in attachment.report()["reason"]
        run(made, inputs())


def test_other_streams_and_changing_streams() -> None:
    made, x = model(), inputs()
    expected = resident(made, x).cpu()
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()]
    torch.cuda.synchronize()
    with weightstream.attach(made, device="cuda", budget=int(weight_bytes(made) * 0.5)):
        for number in range(9):
            stream = streams[number % 3]
            with torch.cuda.stream(stream):
                result = run(made, x)
                stream.synchronize()
                assert same_bits(result.cpu(), expected)


def test_many_steps_without_a_wait_of_the_host() -> None:
    made, x = model(10), inputs(length=16)
    expected = resident(made, x)
    with weightstream.attach(made, device="cuda", budget=int(weight_bytes(made) * 0.4)):
        run(made, x)
        results = [run(made, x) for _ in range(50)]
        assert all(torch.equal(result, expected) for result in results)


def test_a_long_kernel_before_a_block_does_not_let_copies_overtake() -> None:
    made = model(8)
    x = inputs()
    expected = resident(made, x)
    inner = made.blocks[3].norm.forward
    busy = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    made.blocks[3].norm.forward = lambda h: ([busy @ busy for _ in range(60)], inner(h))[1]
    with weightstream.attach(made, device="cuda", budget=int(weight_bytes(made) * 0.4)):
        for _ in range(20):
            assert torch.equal(run(made, x), expected)
    del made.blocks[3].norm.forward


def test_a_capture_of_others_is_refused() -> None:
    made, x = model(), inputs()
    expected = resident(made, x)
    with weightstream.attach(made, device="cuda", budget=int(weight_bytes(made) * 0.5)):
        run(made, x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(StateError, match="captured"), torch.cuda.graph(graph):
            run(made, x)
        assert torch.equal(run(made, x), expected)


def test_guards_serve_host_bytes_and_buffers_come_back() -> None:
    class Counting(MlpBlock):
        def __init__(self, dim: int) -> None:
            super().__init__(dim)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    made, x = model(kind=Counting), inputs()
    true = made.blocks[5].up.weight.clone()
    with weightstream.attach(made, device="cuda", budget=int(weight_bytes(made) * 0.4)) as attachment:
        for _ in range(3):
            run(made, x)
        weight = made.blocks[5].up.weight
        assert same_bits(weight.cpu(), true) and same_bits(weight.clone().cpu(), true)
        assert weight.clone().is_cuda and weight.float().is_cuda
        with attachment.resident(made.blocks[5]):
            assert same_bits((weight + 0).cpu(), true + 0)
        assert made.state_dict()["blocks.2.calls"].item() == 3
    assert all(block.calls.item() == 3 and block.calls.device.type == "cpu" for block in made.blocks)


def test_errors_midway() -> None:
    made, x = model(), inputs()
    expected = resident(made, x)
    inner = made.blocks[3].norm.forward
    armed = [False]

    def norm(h: torch.Tensor) -> torch.Tensor:
        if armed[0]:
            armed[0] = False
            raise torch.OutOfMemoryError("none left")
        return inner(h)

    made.blocks[3].norm.forward = norm
    with weightstream.attach(made, device="cuda", budget=int(weight_bytes(made) * 0.5)):
        for _ in range(10):
            armed[0] = True
            with pytest.raises(torch.OutOfMemoryError):
                run(made, x)
            assert torch.equal(run(made, x), expected)
    del made.blocks[3].norm.forward


def test_two_models_in_two_threads_on_two_streams() -> None:
    pairs = [(model(6, seed=seed), inputs()) for seed in (1, 2)]
    expected = [resident(made, x) for made, x in pairs]
    torch.cuda.synchronize()
    failures: list[Any] = []

    def work(made: Towered, x: torch.Tensor, want: torch.Tensor) -> None:
        try:
            with weightstream.attach(made, device="cuda", budget=int(weight_bytes(made) * 0.5)):
                with torch.cuda.stream(torch.cuda.Stream()):
                    for _ in range(30):
                        result = run(made, x)
                    torch.cuda.current_stream().synchronize()
                    assert torch.equal(result, want)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(*pair, want)) for pair, want in zip(pairs, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_minimum_budget_is_enough_and_memory_comes_back() -> None:
    made, x = model(), inputs()
    expected = resident(made, x)
    with pytest.raises(BudgetError, match="too small") as refused:
        weightstream.attach(made, device="cuda", budget=1 << 20)
    least = int(str(refused.value).split("at least ")[1].split("(")[1].split(" bytes")[0])
    run_free = torch.cuda.mem_get_info()[0]
    with weightstream.attach(made, device="cuda", budget=least):
        for _ in range(3):
            assert torch.equal(run(made, x), expected)
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] >= run_free - (64 << 20)
