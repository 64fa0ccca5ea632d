"""An attached model as one graph: the bits of the resident model's, no more copies than it takes uncompiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from attach_models import (
    MlpBlock,
    Towered,
    assert_same_state,
    attached,
    host,
    inputs,
    mlp,
    run,
    same_bits,
    snapshot,
    transformer,
)
from torch import nn
from whole_models import (
    MODELS,
    ONE_GRAPH,
    Alone,
    Hiding,
    HidingProduct,
    Indexed,
    Revealing,
    Skipping,
    compiled_resident,
    fresh,
    graphs,
    seeded,
)

import weightstream

pytestmark = ONE_GRAPH

BACKENDS = ["eager", "aot_eager", "inductor"]
HARD = ["tied", "twice", "skipping", "late_views"]
"""Models that take the slow compiler, too; it took all of them once."""


@pytest.fixture(autouse=True)
def no_stored_code() -> Iterator[None]:
    """Code that an older lowering made would be tested."""
    import torch._inductor.config

    with torch._inductor.config.patch(force_disable_caches=True):
        yield


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "aot_eager") for name in MODELS),
        *((name, "inductor") for name in HARD),
        ("unlike", "eager"),
    ],
)
def test_the_bits_and_copies_are_those_of_the_resident_and_of_the_uncompiled_model(name: str, backend: str) -> None:
    make, x = MODELS[name], inputs()
    plain = run(make(), x)
    expected = compiled_resident(make, backend, x)
    assert not expected.isnan().any()
    fresh()
    model = make()
    state = snapshot(model)
    uncompiled = a_step_of_whole_blocks(make, x)
    with attached(model, 0.6, device=host("lazy")) as attachment:
        attachment.compile(backend=backend)
        assert same_bits(run(model, x), plain)
        for _ in range(3):
            before = attachment.stats()
            assert same_bits(run(model, x), expected)
        after = attachment.stats()
        assert graphs() == 1
        assert {key: after[key] - before[key] for key in COUNTED} == uncompiled
        assert uncompiled["copied_bytes"] > 0
        assert after["recoveries"] == 0
    assert_same_state(model, state)
    assert same_bits(run(model, x), plain)


COUNTED = ("visits", "copies", "copied_bytes", "fetched_on_demand", "host_waits")


def a_step_of_whole_blocks(make: Callable[[], nn.Module], x: torch.Tensor) -> dict[str, int]:
    """What a step counts whose blocks are compiled one by one."""
    model = make()
    compiled = torch.compile(model, backend="eager")
    with attached(model, 0.6, device=host("lazy")) as attachment:
        for _ in range(4):
            before = attachment.stats()
            run(compiled, x)
        after = attachment.stats()
    fresh()
    return {key: after[key] - before[key] for key in COUNTED}


def test_weights_that_are_read_outside_their_block_are_refused() -> None:
    x, model = inputs(), seeded(lambda: Alone([MlpBlock() for _ in range(5)]))()
    model.out_of_turn = True
    with attached(model, 0.5, device=host("lazy")) as attachment:
        attachment.compile(backend="aot_eager")
        with pytest.raises(weightstream.ForwardError, match="outside their block's forward: blocks.1.up.weight"):
            run(model, x)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_layers_called_out_of_turn_later_get_turns_in_the_graph(backend: str) -> None:
    make, x = seeded(lambda: Alone([MlpBlock() for _ in range(5)])), inputs()
    resident = make().requires_grad_(False)
    resident.out_of_turn = True
    expected = run(torch.compile(resident, fullgraph=True, backend=backend), x)
    fresh()
    model = make()
    with attached(model, 0.5, device=host("lazy")) as attachment:
        attachment.compile(backend=backend)
        for _ in range(2):
            run(model, x)
        model.out_of_turn = True
        for _ in range(2):
            before = attachment.stats()["visits"]
            assert same_bits(run(model, x), expected)
        assert attachment.stats()["visits"] - before == len(model.blocks) + 2


@pytest.mark.parametrize("order", ["eager", "lazy", "random"])
@pytest.mark.parametrize("share", [0.35, 0.5, 0.8, 1.1])
def test_every_budget_and_a_change_of_it_take_the_same_graph(share: float, order: str) -> None:
    x, model = inputs(), transformer(blocks=6)
    expected = run(model, x)
    with attached(model, share, device=host(order)) as attachment:
        attachment.compile(backend="aot_eager")
        for _ in range(3):
            assert same_bits(run(model, x), expected)
        whole = attachment.budget
        for change in (int(whole * 1.3), whole, None):
            attachment.set_budget(change)
            for _ in range(2):
                assert same_bits(run(model, x), expected)
        assert graphs() == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_other_shapes_compile_again(backend: str) -> None:
    make = seeded(lambda: Skipping([MlpBlock() for _ in range(4)]))
    sizes = [(2, 5), (3, 9), (4, 7), (2, 5)]
    shaped = [torch.randn(*size, 8, generator=torch.Generator().manual_seed(7)) for size in sizes]
    resident = torch.compile(make().requires_grad_(False), fullgraph=True, backend=backend)
    expected = [run(resident, x) for x in shaped]
    torch._dynamo.reset()
    model = make()
    with attached(model, 0.5, device=host("lazy")) as attachment:
        attachment.compile(backend=backend)
        run(model, shaped[0])
        for x, result in zip(shaped, expected):
            assert same_bits(run(model, x), result)


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_an_error_in_the_middle_of_a_step_the_next_one_is_right(backend: str) -> None:
    make, x, index = seeded(Indexed), inputs(), torch.arange(5)
    expected = compiled_resident(make, backend, x, index)
    torch._dynamo.reset()
    model = make()
    state = snapshot(model)
    with attached(model, 0.5, device=host("lazy")) as attachment:
        attachment.compile(backend=backend)
        for _ in range(2):
            run(model, x, index)
        for _ in range(2):
            with pytest.raises((IndexError, RuntimeError)):
                run(model, x, torch.full((5,), 99))
            assert same_bits(run(model, x, index), expected)
        assert attachment.stats()["recoveries"] > 0
    assert_same_state(model, state)


def test_an_error_while_it_is_traced_leaves_the_model_usable() -> None:
    x, model = inputs(), mlp()
    expected = run(model, x)
    with attached(model, 0.5, device=host("lazy")) as attachment:
        attachment.compile(backend="aot_eager")
        run(model, x)
        with pytest.raises(Exception, match="."):
            run(model, torch.ones(1, 3))
        for _ in range(2):
            assert same_bits(run(model, x), expected)


def test_steps_before_and_other_settings_after() -> None:
    x, model = inputs(), transformer()
    expected = run(model, x)
    with attached(model, 0.6, device=host("lazy")) as attachment:
        for _ in range(3):
            assert same_bits(run(model, x), expected)
        assert max(attachment.report()["segments"].values()) > 1
        for backend in ("eager", "aot_eager"):
            attachment.compile(backend=backend)
            for _ in range(3):
                assert same_bits(run(model, x), expected)
        assert graphs() == 2
        with torch.no_grad():
            assert same_bits(model(x), expected)
        assert same_bits(model(x), expected)


def test_parameters_made_in_inference_mode() -> None:
    x = inputs()
    with torch.inference_mode():
        model = mlp()
    expected = run(model, x)
    with attached(model, 0.5, device=host("lazy")) as attachment:
        attachment.compile(backend="aot_eager")
        for _ in range(3):
            assert same_bits(run(model, x), expected)


def test_attached_again_and_again() -> None:
    x, model = inputs(), mlp()
    expected = run(model, x)
    for _ in range(10):
        with attached(model, 0.5, device=host("lazy")) as attachment:
            attachment.compile(backend="aot_eager")
            for _ in range(2):
                assert same_bits(run(model, x), expected)


def test_generated_code_passes_the_weights_themselves() -> None:
    from torch._inductor.utils import run_and_get_code

    x, model = inputs(), MODELS["skipping"]()
    with attached(model, 0.5, device=host("lazy")) as attachment:
        attachment.compile()
        run(model, x)
        _, (code,) = run_and_get_code(run, model, x)
    calls = [line.strip() for line in code.splitlines() if "torch.ops.weightstream." in line]
    assert [call.split("(")[0].split(".")[-2] for call in calls] == ["enter", "leave"] * len(model.blocks)
    for call in calls:
        weights = call[call.index("[") + 1 : call.index("]")].split(", ")
        assert len(weights) == 6 and all(weight.startswith("arg") for weight in weights), call
    assert "clone" not in code and "copy_(" not in code


class Branching(Towered):
    """Takes a way that depends on what it computes, which no one graph can."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if float(y.sum()) > 0 else -y


def test_disabling_gives_back_a_model_that_streams_in_segments() -> None:
    x = inputs()
    make = seeded(lambda: Branching([MlpBlock() for _ in range(4)]))
    model = make()
    expected = run(make(), x)
    with attached(model, 0.5, device=host("lazy")) as attachment:
        attachment.compile(disable=True)
        attachment.compile(backend="aot_eager")
        assert same_bits(run(model, x), expected), "watched, uncompiled"
        for _ in range(2):
            with pytest.raises(torch._dynamo.exc.Unsupported):
                run(model, x)
        attachment.compile(disable=True)
        for _ in range(3):
            assert same_bits(run(model, x), expected)
        assert max(attachment.report()["segments"].values()) > 1
    assert same_bits(run(model, x), expected)


def test_refusals() -> None:
    import torch._inductor.config

    x, model = inputs(), mlp()
    expected = run(model, x)
    with attached(model, 0.5) as attachment:
        with pytest.raises(weightstream.StateError, match="option freezing"):
            attachment.compile(options={"freezing": True})
        with torch._inductor.config.patch(freezing=True), pytest.raises(weightstream.StateError, match="freezing"):
            attachment.compile()
        attachment.compile(backend="aot_eager")
        for _ in range(2):
            assert same_bits(run(model, x), expected)
        with torch._inductor.config.patch(freezing=True), pytest.raises(weightstream.StateError, match="freezing"):
            run(model, x)
        with pytest.raises(weightstream.ForwardError, match="requires grad"):
            model(x.clone().requires_grad_())
        assert same_bits(run(model, x), expected)
    with pytest.raises(weightstream.StateError, match="detached"):
        attachment.compile()


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    with attached(model, 0.5) as attachment:
        for version in ("2.10.0", "2.12.0+cu130", "2.110.0"):
            monkeypatch.setattr(torch, "__version__", version)
            with pytest.raises(weightstream.NotAvailableError, match="2.11 only"):
                attachment.compile()


def test_a_backend_that_copies_weights_is_found_out() -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    x, model = inputs(), mlp()
    state = snapshot(model)
    with attached(model, 0.5, device=host("lazy")) as attachment:
        attachment.compile(backend=aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward)))
        run(model, x)
        for _ in range(2):
            with pytest.raises(weightstream.ForwardError, match="copies weights"):
                run(model, x)
    assert_same_state(model, state)


@pytest.mark.parametrize("block", [Hiding, HidingProduct])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_block_hides_is_right(backend: str, block: type[nn.Module]) -> None:
    make, x = seeded(lambda: Revealing(block)), inputs()
    expected = compiled_resident(make, backend, x)
    torch._dynamo.reset()
    model = make()
    with attached(model, 0.5, device=host("lazy")) as attachment:
        attachment.compile(backend=backend)
        run(model, x)
        for _ in range(2):
            assert same_bits(run(model, x), expected)


def test_blocks_and_layers_called_alone_compute_uncompiled() -> None:
    x, model = torch.ones(1, 64), mlp()
    expected, up = run(model.blocks[2], x), run(model.blocks[2].up, x)
    with attached(model, 0.5, device=host("lazy")) as attachment:
        attachment.compile(backend="aot_eager")
        for _ in range(3):
            run(model, inputs())
            assert same_bits(run(model.blocks[2], x), expected)
            assert same_bits(run(model.blocks[2].up, x), up)
        kept = model.blocks[2].forward
        assert same_bits(run(torch.compile(model.blocks[2], backend="eager"), x), expected)
        run(model, inputs())
    assert same_bits(run(kept, x), expected)
    assert "forward" not in model.__dict__ and "forward" not in model.blocks[2].__dict__


def test_who_compiled_the_root_as_well_gets_the_same_graph() -> None:
    x, model = inputs(), mlp()
    expected = run(model, x)
    with attached(model, 0.5, device=host("lazy")) as attachment:
        attachment.compile(backend="aot_eager")
        compiled = torch.compile(model, backend="eager")
        for _ in range(4):
            assert same_bits(run(compiled, x), expected)
        assert same_bits(run(model, x), expected)
