"""An attached model as one graph on a GPU: the bits of the same graph with resident weights, no weight copied."""

from __future__ import annotations

import pytest
import torch
from attach_models import AttentionBlock, MlpBlock, Towered, assert_same_state, run, same_bits, snapshot, weight_bytes
from torch import nn
from whole_models import ONE_GRAPH

import weightstream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use"),
    *ONE_GRAPH,
]

DIM = 1024


def model(kind: type[nn.Module]) -> Towered:
    """A tower of some 16 MiB a block in bf16."""
    torch.manual_seed(0)
    return Towered([kind(DIM) for _ in range(8)], DIM).bfloat16().eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("share", "kind", "mode"),
    [
        (0.35, MlpBlock, None),
        (0.6, AttentionBlock, None),
        (0.35, AttentionBlock, "reduce-overhead"),
        (0.6, MlpBlock, "reduce-overhead"),
    ],
)
def test_the_bits_are_those_of_the_resident_graph(share: float, kind: type[nn.Module], mode: str | None) -> None:
    """With Inductor told to round where the uncompiled model does: it fuses other operators here, and leaves other roundings out."""
    import torch._inductor.config

    with torch._inductor.config.patch(emulate_precision_casts=True):
        x = inputs()
        resident = torch.compile(model(kind).cuda(), fullgraph=True, mode=mode)
        expected = [run(resident, x).clone() for _ in range(4)][-1]
        del resident
        torch._dynamo.reset()
        made = model(kind)
        state = snapshot(made)
        budget = int(weight_bytes(made) * share)
        with weightstream.attach(made, device="cuda", budget=budget) as attachment:
            attachment.compile(mode=mode)
            # Watched, compiled, and what CUDA graphs take to be recorded, workspaces of cuBLAS included.
            for _ in range(5):
                run(made, x)
            torch.cuda.synchronize()
            before, allocated = attachment.stats(), torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            for _ in range(6):
                assert same_bits(run(made, x).clone().cpu(), expected.cpu())
            # A copy of one block's weights would show.
            assert torch.cuda.max_memory_allocated() - allocated < weight_bytes(made.blocks[0]) // 2
            after = attachment.stats()
            assert after["visits"] - before["visits"] == 6 * len(made.blocks)
            assert after["copied_bytes"] > before["copied_bytes"]
        assert_same_state(made, state)


def test_every_budget_gives_the_same_bits_by_the_same_graph() -> None:
    x, made = inputs(), model(AttentionBlock)
    whole = weight_bytes(made)
    plain = run(made.cuda(), x).float()
    made.cpu()
    with weightstream.attach(made, device="cuda", budget=2 * whole) as attachment:
        attachment.compile()
        run(made, x)
        expected = run(made, x).clone()
        assert attachment.stats()["copied_bytes"] <= whole * 2
        # In bfloat16, of numbers about 1: the roundings that Inductor leaves out.
        assert (expected.float() - plain).abs().max() < 0.05
        for share in (0.35, 0.6, 0.35, 2.0):
            attachment.set_budget(int(whole * share))
            before = attachment.stats()["copied_bytes"]
            for _ in range(4):
                assert same_bits(run(made, x).clone().cpu(), expected.cpu())
            assert (attachment.stats()["copied_bytes"] > before + whole) == (share < 1)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_other_shapes_and_inputs_that_fail() -> None:
    made = model(MlpBlock)
    with weightstream.attach(made, device="cuda", budget=int(weight_bytes(made) * 0.5)) as attachment:
        attachment.compile()
        run(made, inputs())
        for length in (64, 96, 33, 64):
            expected = run(made, inputs(length)).clone()
            assert not expected.isnan().any()
            with pytest.raises(Exception, match="."):
                run(made, inputs(length)[..., :5])
            assert same_bits(run(made, inputs(length)).clone().cpu(), expected.cpu())


def inputs(length: int = 64) -> torch.Tensor:
    """One sequence."""
    return torch.randn(1, length, 8, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
