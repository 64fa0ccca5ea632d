"""An attached model computes the same bits as the resident one, within its budget, and comes back as it was."""

from __future__ import annotations

import gc
import warnings
import weakref

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
    weight_bytes,
)
from torch import nn

import weightstream

MAKERS = {"mlp": mlp, "transformer": transformer}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("order", ["eager", "lazy", "random"])
@pytest.mark.parametrize("share", [0.3, 0.45, 0.6, 0.9, 2.0])
def test_every_budget_and_copy_order_gives_the_same_bits(maker: str, order: str, share: float) -> None:
    model = MAKERS[maker](6)
    x = inputs()
    expected = run(model, x)
    before = snapshot(model)
    budget = int(weight_bytes(model) * share)
    attachment = weightstream.attach(model, device=host(order, seed=3), budget=budget)
    for _ in range(4):
        assert same_bits(run(model, x), expected)
    report = attachment.report()
    assert report["engine"]["page_bytes_peak"] <= budget
    streamed = report["streamed_bytes_per_step"]
    assert (streamed == 0) == (share > 1), report
    if share < 1:
        assert attachment.stats()["copied_bytes"] >= 2 * streamed > 0
    attachment.detach()
    assert_same_state(model, before)
    assert same_bits(run(model, x), expected)


@pytest.mark.parametrize("granularity", [4096, 65536, 2 << 20])
@pytest.mark.parametrize("look_ahead", [None, 0, 1, 5])
def test_granularity_and_look_ahead_do_not_change_a_bit(granularity: int, look_ahead: int | None) -> None:
    torch.manual_seed(2)
    model = Towered([MlpBlock(256) for _ in range(8)], 256)
    x = inputs()
    expected = run(model, x)
    with attached(model, 0.7, device=host(granularity=granularity), look_ahead=look_ahead) as attachment:
        for _ in range(3):
            assert same_bits(run(model, x), expected)
        assert attachment.stats()["copies"] > 0


def test_blocks_are_cut_after_the_first_step() -> None:
    model = mlp()
    with attached(model) as attachment:
        assert attachment.report()["segments"] == {}
        run(model, inputs())
        assert set(attachment.report()["segments"].values()) == {2}
        visits = attachment.stats()["visits"]
        run(model, inputs())
        assert attachment.stats()["visits"] == visits + 12


def test_the_planner_cuts_only_where_it_pays(cuts_where_it_pays: None) -> None:
    model = mlp()
    x = inputs()
    expected = run(model, x)
    with attached(model) as attachment:
        for _ in range(3):
            assert same_bits(run(model, x), expected)
        assert set(attachment.report()["segments"].values()) == {1}


def test_the_same_objects_stay_in_the_model_and_their_settings_come_back() -> None:
    model = mlp()
    model.stem.weight.requires_grad_(False)
    parameters = dict(model.named_parameters())
    grads = {name: parameter.requires_grad for name, parameter in parameters.items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    with attached(model):
        run(model, inputs())
        assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == grads
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    model(inputs()).sum().backward()
    assert model.head.weight.grad is not None


def test_grad_mode_contexts() -> None:
    model = mlp()
    x = inputs()
    expected = run(model, x)
    with attached(model):
        with torch.no_grad():
            assert same_bits(model(x), expected)
        with torch.inference_mode():
            assert same_bits(model(x), expected)
        result = model(x)
        assert same_bits(result, expected) and not result.requires_grad


def test_parameters_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = mlp()
    x = inputs()
    expected = run(model, x)
    before = snapshot(model)
    with attached(model):
        assert all(parameter.is_inference() for parameter in model.parameters())
        assert same_bits(run(model, x), expected)
    assert_same_state(model, before)
    assert all(parameter.is_inference() for parameter in model.parameters())


def test_attach_inside_inference_mode_leaves_normal_parameters() -> None:
    model = mlp()
    with torch.inference_mode():
        attachment = weightstream.attach(model, device=host(), budget=weight_bytes(model) // 2)
        model(inputs())
    attachment.detach()
    assert not any(parameter.is_inference() for parameter in model.parameters())
    model(inputs()).sum().backward()


def test_buffers_may_be_written_and_come_back() -> None:
    class Counting(MlpBlock):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("last", torch.zeros(3), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.last = self.last + 1  # replaced, not written in place
            return super().forward(x)

    model = Towered([Counting() for _ in range(4)])
    with attached(model, 0.6):
        run(model, inputs())
        run(model, inputs())
        assert model.state_dict()["blocks.0.calls"] == 2
    assert all(block.calls == 2 and block.last.tolist() == [2.0] * 3 for block in model.blocks)


def test_strides_dtypes_and_odd_shapes_survive() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transposed = nn.Parameter(torch.randn(48, 32).t())
            self.strided = nn.Parameter(torch.randn(40, 64)[:, ::2])
            self.scalar = nn.Parameter(torch.tensor(1.5))
            self.empty = nn.Parameter(torch.empty(0, 4))
            self.bfloat = nn.Parameter(torch.randn(32, 32).bfloat16())
            self.integers = nn.Parameter(torch.randint(-9, 9, (33,), dtype=torch.int8), requires_grad=False)
            self.pairs = nn.Parameter(torch.randn(16, dtype=torch.complex64))
            self.eight = nn.Parameter(torch.randn(64, 16).to(torch.float8_e4m3fn), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x @ self.transposed @ self.transposed.t() * self.scalar + self.strided.sum() + self.empty.sum()
            x = x @ self.bfloat.float() + self.integers.sum() + self.pairs.real.sum()
            return x + self.eight.float().mean()

    torch.manual_seed(0)
    model = nn.Sequential(*[Odd() for _ in range(6)])
    strides = {name: value.stride() for name, value in model.named_parameters()}
    x = torch.randn(3, 32)
    expected = run(model, x)
    with attached(model, 0.7) as attachment:
        assert {name: value.stride() for name, value in model.named_parameters()} == strides
        assert all(p.data_ptr() % 512 == 0 for p in model.parameters() if p.numel())
        for _ in range(3):
            assert same_bits(run(model, x), expected)
        assert attachment.stats()["copies"] > 0
    assert {name: value.stride() for name, value in model.named_parameters()} == strides


def test_a_parameter_saves_only_its_own_bytes(tmp_path: object) -> None:
    model = mlp()
    with attached(model):
        assert model.head.bias.untyped_storage().nbytes() == model.head.bias.nbytes
        assert model.state_dict()["head.bias"].untyped_storage().nbytes() == model.head.bias.nbytes


def test_detach_twice_and_as_a_context_manager() -> None:
    model = mlp()
    with attached(model) as attachment:
        run(model, inputs())
        steps = attachment.stats()["steps"]
        assert attachment.detach() is model
    assert not attachment.attached
    assert attachment.detach() is model
    assert attachment.stats()["steps"] == steps and attachment.report()["towers"] == {"blocks": 6}
    with pytest.raises(weightstream.StateError, match="detached"):
        with attachment.resident(model):
            pass


def test_attach_again_after_detach() -> None:
    model = transformer()
    x = inputs()
    expected = run(model, x)
    for share in (0.4, 0.8, 0.5):
        with attached(model, share) as attachment:
            assert attachment.report()["survivors"] == []
            assert same_bits(run(model, x), expected)
            assert same_bits(run(model, x), expected)


def test_an_attached_model_that_is_dropped_is_collected() -> None:
    model = mlp()
    attachment = weightstream.attach(model, device=host("lazy"), budget=weight_bytes(model) // 2)
    run(model, inputs())
    offloader = attachment._runtime.offloader
    gone = weakref.ref(model)
    del model, attachment
    gc.collect()
    assert gone() is None
    with pytest.raises(weightstream.StateError):
        offloader.stats()


def test_a_call_of_a_block_without_the_root_works() -> None:
    model = transformer()
    x = torch.randn(2, 5, 64)
    expected = [run(block, x) for block in model.blocks]
    with attached(model, 0.5):
        for _ in range(2):  # whole blocks, then segments
            for block, want in zip(model.blocks, expected):
                assert same_bits(run(block, x), want)
            run(model, inputs())


def test_a_segment_called_outside_its_block_works() -> None:
    model = transformer()
    x = torch.randn(2, 5, 64)
    expected = run(model.blocks[2].mlp.up, x)
    with attached(model, 0.5) as attachment:
        run(model, inputs())
        assert set(attachment.report()["segments"].values()) != {1}
        assert same_bits(run(model.blocks[2].mlp.up, x), expected)


def test_order_that_changes_from_step_to_step() -> None:
    class Skipping(Towered):
        def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
            x = self.stem(x)
            for number in order:
                x = self.blocks[number](x)
            return self.head(x)

    torch.manual_seed(0)
    model = Skipping([MlpBlock() for _ in range(6)])
    orders = [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (0, 2, 4), (1, 1, 1), (3,), (0, 1, 2, 3, 4, 5), ()]
    x = inputs()
    expected = {order: run(model, x, order) for order in orders}
    with attached(model, 0.4):
        for order in orders + orders[::-1]:
            assert same_bits(run(model, x, order), expected[order]), order


def test_resident_keeps_weights_for_use_outside_their_turn() -> None:
    model = mlp()
    block = model.blocks[4]
    expected = block.up.weight.detach().clone()
    with attached(model, 0.6) as attachment:
        run(model, inputs())
        with attachment.resident(block):
            assert same_bits(block.up.weight + 0, expected + 0)
            run(model.blocks[4], torch.randn(1, 2, 64))
        run(model, inputs())
        with pytest.raises(weightstream.ModelError, match="not part of"):
            with attachment.resident(nn.Linear(2, 2)):
                pass


@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_compiled_model_runs_the_engine_outside_its_graphs(compiled_before: bool) -> None:
    torch._dynamo.reset()
    model = transformer()
    x = inputs()
    expected = run(model, x)
    compiled = torch.compile(model, backend="eager")
    if compiled_before:
        assert same_bits(run(compiled, x), expected)
    with attached(model, 0.5) as attachment, warnings.catch_warnings():
        warnings.simplefilter("error")
        torch._dynamo.utils.counters.clear()
        for _ in range(4):
            assert same_bits(run(compiled, x), expected)
        assert attachment.stats()["steps"] == 4 and attachment.stats()["copies"] > 0
        assert not torch._dynamo.utils.counters["graph_break"]


def test_without_a_budget_a_share_of_what_is_free_is_taken() -> None:
    model = mlp()
    with weightstream.attach(model, device=weightstream.HostDevice(bytes="2MiB", granularity=4096)) as attachment:
        run(model, inputs())
        assert attachment.report()["engine"]["page_limit_bytes"] == int(0.6 * (2 << 20))
    with weightstream.attach(model, device="host") as attachment:
        run(model, inputs())
        assert attachment.report()["streamed_bytes_per_step"] == 0


def test_blocks_are_not_cut_while_something_is_held() -> None:
    model = mlp()
    x = inputs()
    expected = run(model, x)
    with attached(model, 2.0) as attachment:
        with attachment.resident(model.blocks[5].up):
            assert same_bits(run(model, x), expected)
            assert attachment.report()["segments"] == {}
        assert same_bits(run(model, x), expected)
        assert set(attachment.report()["segments"].values()) == {2}


def test_a_changed_model_waits_for_the_end_of_a_hold() -> None:
    model = mlp()
    x = inputs()
    expected = run(model, x)
    with attached(model, 0.3) as attachment:
        run(model, x)
        model.blocks[1].up.train()
        with attachment.resident(model.blocks[5].up), pytest.raises(weightstream.StateError, match="held"):
            run(model, x)
        for _ in range(3):
            assert same_bits(run(model, x), expected)


def test_an_interrupt_while_units_change_is_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer()
    x = inputs()
    expected = run(model, x)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with attached(model, 0.5):
        monkeypatch.setattr("weightstream.steps.ModelSteps._wrap_segments", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(model, x)
        monkeypatch.undo()
        for _ in range(3):
            assert same_bits(run(model, x), expected)
