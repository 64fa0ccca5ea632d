"""Bad input: each gets one typed error that says what to do, and changes nothing."""

from __future__ import annotations

import copy
import importlib
import os
import pickle

import pytest
import torch
from attach_models import Towered, assert_same_state, attached, host, inputs, mlp, run, same_bits, snapshot
from torch import nn

import weightstream
from weightstream import BudgetError, DeviceError, ForwardError, ModelError, StateError


def refused(model: nn.Module, error: type[Exception], match: str, **settings: object) -> str:
    """Attach is refused with this error and leaves the model as it was; gives the text."""
    before = {name: (id(value), value.data_ptr(), value.requires_grad) for name, value in model.named_parameters()}
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    settings.setdefault("device", host())
    settings.setdefault("budget", "1MiB")
    with pytest.raises(error, match=match) as raised:
        weightstream.attach(model, **settings)
    assert isinstance(raised.value, weightstream.WeightstreamError)
    after = {name: (id(value), value.data_ptr(), value.requires_grad) for name, value in model.named_parameters()}
    assert after == before
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == attributes
    return str(raised.value)


@pytest.mark.parametrize(
    ("budget", "match"),
    [
        (0, "more than nothing"), (-5, "more than nothing"), ("0", "more than nothing"), ("-1MiB", "more than nothing"),
        ("0%", "more than nothing"), ("101%", "at most 100%"), ("lots", "write bytes"), ("", "write bytes"),
        ("5 parsecs", "known units"), (1.5, "give bytes"), (True, "give bytes"), ([1], "give bytes"),
        (1 << 70, "no device has"), (-(1 << 70), "more than nothing"), ("nan", "budget"), (1 << 62, "only"),
    ],
)  # fmt: skip
def test_budgets_that_cannot_be_one(budget: object, match: str) -> None:
    refused(mlp(), BudgetError, match, budget=budget)


def test_a_budget_below_the_minimum_names_it_and_the_largest_unit() -> None:
    model = mlp()
    text = refused(model, BudgetError, "too small", budget=4096)
    assert "blocks." in text and "minimum" in text
    printed = text.split("at least ")[1]
    minimum = int(printed.split("(")[1].split(" bytes")[0])
    assert weightstream._native.parse_bytes(printed.split(" (")[0]) >= minimum
    x = inputs()
    expected = run(model, x)
    refused(model, BudgetError, "too small", budget=minimum - 1)
    with attached(model, budget=minimum) as attachment:
        for _ in range(3):
            assert same_bits(run(model, x), expected)
        assert attachment.report()["engine"]["page_bytes_peak"] <= minimum


def test_an_emulator_smaller_than_the_budget() -> None:
    refused(mlp(), BudgetError, "has only", device=host(bytes="64KiB"), budget="1MiB")


@pytest.mark.parametrize(
    ("device", "match"), [("tpu", "no device for weights"), (3, "no device for weights"), ("cuda:x", "cuda")]
)
def test_devices_that_are_none(device: object, match: str) -> None:
    refused(mlp(), DeviceError, match, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_says_why() -> None:
    refused(mlp(), DeviceError, ".", device="cuda:0")


@pytest.mark.parametrize("look_ahead", [-1, 1.5, "two", True])
def test_look_aheads_that_are_none(look_ahead: object) -> None:
    refused(mlp(), BudgetError, "look_ahead", look_ahead=look_ahead)


def test_what_is_no_model() -> None:
    with pytest.raises(ModelError, match="torch.nn.Module"):
        weightstream.attach([mlp()], device=host())
    refused(nn.Sequential(nn.ReLU(), nn.ReLU()), ModelError, "no parameters")
    refused(mlp(), ModelError, "towers= names", towers=["nothing"])


def test_models_that_are_not_in_host_memory() -> None:
    with torch.device("meta"):
        model = Towered([nn.Linear(64, 64) for _ in range(3)])
    refused(model, ModelError, "meta")
    with pytest.raises(ModelError, match="lazy"):
        weightstream.attach(nn.LazyLinear(3), device=host())


def test_tensors_that_cannot_be_bound_are_named() -> None:
    model = mlp()
    model.blocks[2].register_buffer("table", torch.eye(4).to_sparse())
    refused(model, ModelError, r"blocks\.2\.table.*sparse")

    class Opaque(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN206
            return func(*args, **(kwargs or {}))

    model = mlp()
    model.head.register_buffer("odd", torch.Tensor._make_subclass(Opaque, torch.zeros(3)))
    refused(model, ModelError, r"head\.odd.*Opaque")


def test_script_modules_and_parallel_wrappers() -> None:
    refused(torch.jit.script(nn.Linear(4, 4)), ModelError, "ScriptModule")
    refused(nn.DataParallel(mlp()), ModelError, "DataParallel")


def test_modules_that_others_move() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = mlp()
    accelerate.hooks.add_hook_to_module(model.blocks[1], accelerate.hooks.AlignDevicesHook("cpu"))
    refused(model, ModelError, r"blocks\.1.*accelerate")


def test_layerwise_casting_of_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = mlp()
    diffusers.hooks.apply_layerwise_casting(model, torch.float8_e4m3fn, torch.float32)
    refused(model, ModelError, "layerwise_casting")


def test_attaching_twice() -> None:
    model = mlp()
    with attached(model):
        for again in (model, model.blocks, nn.Sequential(model), Towered([model.blocks[0]])):
            with pytest.raises(StateError, match="attached"):
                weightstream.attach(again, device=host())
        run(model, inputs())


CHANGES = {
    "to": lambda m: m.to("cpu"),
    "to dtype": lambda m: m.to(torch.float16),
    "half": lambda m: m.half(),
    "cuda": lambda m: m.cuda(),
    "cpu": lambda m: m.cpu(),
    "a part": lambda m: m.blocks[1].up.half(),
    "a whole around it": lambda m: nn.ModuleList([m]).double(),
    "load_state_dict": lambda m: m.load_state_dict(m.state_dict()),
    "load a part": lambda m: m.head.load_state_dict(m.head.state_dict()),
    "deepcopy": lambda m: copy.deepcopy(m),
    "deepcopy a part": lambda m: copy.deepcopy(m.blocks[1].norm),
    "pickle": lambda m: pickle.dumps(m),
    "torch.save": lambda m: torch.save(m, os.devnull),
    "share_memory": lambda m: m.share_memory(),
    "replicate": lambda m: m._replicate_for_data_parallel(),
    "requires_grad_": lambda m: m.requires_grad_(True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_an_attached_model_are_refused(change: str) -> None:
    model = mlp()
    x = inputs()
    expected = run(model, x)
    before = snapshot(model)
    with attached(model, 0.5):
        run(model, x)
        with pytest.raises(StateError):
            CHANGES[change](model)
        assert same_bits(run(model, x), expected)
    assert_same_state(model, before)
    CHANGES["deepcopy"](model)
    CHANGES["pickle"](model)


def test_state_dict_gives_cpu_tensors_with_the_true_bytes() -> None:
    model = mlp()
    before = snapshot(model)
    with attached(model, 0.4):
        run(model, inputs())
        assert_same_state(model, before)
        part = model.blocks[3].state_dict(prefix="p.")
        assert all(same_bits(value, before["blocks.3." + name[2:]]) for name, value in part.items())
        other = mlp(seed=9)
        other.load_state_dict(model.state_dict())
        assert same_bits(run(other, inputs()), run(model, inputs()))
        state = model.state_dict()
    assert all(same_bits(state[name], value) for name, value in before.items())


def test_replaced_and_moved_parameters_are_named_at_the_next_step() -> None:
    model = mlp()
    x = inputs()
    with attached(model):
        run(model, x)
        kept = model.blocks[2].up.weight
        model.blocks[2].up.weight = nn.Parameter(torch.zeros_like(kept), requires_grad=False)
        with pytest.raises(StateError, match=r"blocks\.2\.up\.weight is not where"):
            run(model, x)
        model.blocks[2].up.weight = kept
        run(model, x)
        bias = model.blocks[1].down.bias
        # What a guard cannot refuse, for it is past the parameter's own class.
        set_data = torch.Tensor.data.__set__
        at_device = torch.Tensor.data.__get__(bias)
        set_data(bias, torch.zeros(64))
        with pytest.raises(StateError, match=r"blocks\.1\.down\.bias"):
            run(model, x)
        set_data(bias, at_device)
        del model.head.bias
        with pytest.raises(StateError, match=r"head\.bias"):
            run(model, x)


def test_functional_call_with_foreign_weights_passes_through() -> None:
    model = mlp()
    x = inputs()
    zeros = {name: torch.zeros_like(value) for name, value in model.state_dict().items() if "head" in name}
    with torch.inference_mode():
        expected = torch.func.functional_call(model, zeros, (x,))
    with attached(model), torch.inference_mode():
        for _ in range(2):
            assert same_bits(torch.func.functional_call(model, zeros, (x,)), expected)


def test_inputs_and_outputs_that_require_grad() -> None:
    model = mlp()
    x = inputs()
    expected = run(model, x)
    with attached(model):
        with pytest.raises(ForwardError, match="input of blocks.0 requires grad"):
            model(x.clone().requires_grad_())
        adapter = nn.Linear(64, 64)
        block = model.blocks[1]
        inner, block.norm.forward = block.norm.forward, lambda h: adapter(h)
        with pytest.raises(ForwardError, match="output of blocks.1 requires grad"):
            model(x)
        del block.norm.forward
        assert same_bits(run(model, x.clone().requires_grad_()), expected)
        del inner


def test_a_write_to_a_managed_parameter_in_forward() -> None:
    class Rescaling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._foreach_div_([self.weight], 2.0)
            return super().forward(x)

    model = Towered([Rescaling(64, 64) for _ in range(4)])
    before = snapshot(model)
    with attached(model, 0.6):
        with pytest.raises(ForwardError, match=r"blocks\.0\.weight"):
            run(model, inputs())
    assert_same_state(model, before)


@pytest.mark.parametrize("place", ["source", "start", "bind", "wrap"])
def test_a_failure_half_way_leaves_the_model_plain(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("weightstream.attaching")
    model = mlp()
    x = inputs()
    expected = run(model, x)
    before = snapshot(model)
    parameters = {name: (id(p), type(p), p.requires_grad) for name, p in model.named_parameters()}
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}

    class Failing:
        """The native plan, which fails in one of its calls."""

        def __init__(self, plan: object) -> None:
            self.plan, self.calls = plan, 0

        def source(self, tensors: list, *watch: object) -> list:
            self.calls += 1
            if place == "source" and self.calls == 3:
                raise DeviceError("source")
            return self.plan.source(tensors, *watch)

        def start(self, *watch: object) -> object:
            if place == "start":
                raise DeviceError("start")
            return self.plan.start(*watch)

    def fail(*_: object) -> None:
        raise DeviceError(place)

    plan = module._plan
    monkeypatch.setattr(module, "_plan", lambda *arguments: Failing(plan(*arguments)))
    if place == "bind":
        monkeypatch.setattr("weightstream.binding.managed_class", fail)
    if place == "wrap":
        monkeypatch.setattr(module, "refuse_changes", fail)
    with pytest.raises(DeviceError, match=place):
        weightstream.attach(model, device=host(), budget="500KiB")
    monkeypatch.undo()
    assert {name: (id(p), type(p), p.requires_grad) for name, p in model.named_parameters()} == parameters
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
    assert_same_state(model, before)
    assert same_bits(run(model, x), expected)
    with attached(model):
        assert same_bits(run(model, x), expected)
