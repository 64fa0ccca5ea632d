"""Budgets that change between forwards: bits, what is copied, refusals, the net below the turns, and shared devices."""

from __future__ import annotations

import threading

import pytest
import torch
from attach_models import assert_same_state, attached, host, inputs, mlp, run, same_bits, snapshot, weight_bytes
from pipeline_models import check, device, pipeline

from weightstream import BudgetError, StateError, offload


@pytest.mark.parametrize("order", ["eager", "lazy", "random"])
def test_the_bits_stay_while_the_budget_goes_up_and_down(order: str) -> None:
    model = mlp(8)
    x, whole, before = inputs(), weight_bytes(model), snapshot(model)
    expected = run(model, x)
    with attached(model, 0.4, device=host(order, seed=5)) as attachment:
        last = 0.4
        for share in (0.4, 0.7, 0.5, 2.0, 0.35, 0.9, 0.4):
            uploaded = attachment.stats()["uploaded_bytes"]
            attachment.set_budget(int(whole * share))
            assert attachment.budget == int(whole * share)
            engine = attachment.report()["engine"]
            assert engine["page_bytes_in_use"] <= whole * share
            if share <= last:
                assert attachment.stats()["uploaded_bytes"] == uploaded, "a lower budget copies nothing"
            else:
                assert 0 <= attachment.stats()["uploaded_bytes"] - uploaded <= whole * share
            last = share
            for _ in range(3):
                assert same_bits(run(model, x), expected)
            assert attachment.report()["engine"]["page_bytes_in_use"] <= whole * share
        assert attachment.report()["streamed_bytes_per_step"] > 0
    assert_same_state(model, before)
    with pytest.raises(StateError, match="detached"):
        attachment.set_budget(whole)
    assert attachment.budget is None


def test_a_budget_is_spelled_as_attach_takes_it_and_refused_with_the_minimum() -> None:
    model = mlp()
    x = inputs()
    expected = run(model, x)
    with attached(model, 0.6) as attachment:
        run(model, x)
        plan = attachment.report()["engine"]["units"]
        budget = attachment.budget
        with pytest.raises(BudgetError, match=r"needs at least .* \((\d+) bytes\)") as refused:
            attachment.set_budget(1000)
        minimum = int(str(refused.value).rsplit("at least ", 1)[1].split("(")[1].split(" bytes")[0])
        for bad in (0, -1, True, "much", "101%", 1.5, minimum - 1):
            with pytest.raises(BudgetError):
                attachment.set_budget(bad)
        assert attachment.report()["engine"]["units"] == plan and attachment.budget == budget
        attachment.set_budget(minimum)
        assert same_bits(run(model, x), expected)
        for spelling in (f"{minimum + 4096}", "1MiB", "100%", None):
            attachment.set_budget(spelling)
            assert same_bits(run(model, x), expected)
        assert attachment.report()["streamed_bytes_per_step"] == 0


def test_inside_a_forward_a_budget_is_refused_and_the_forward_goes_on() -> None:
    model = mlp()
    x = inputs()
    expected = run(model, x)
    with attached(model, 0.6) as attachment:
        refusals: list[str] = []

        def change(*_: object) -> None:
            with pytest.raises(StateError, match="set_budget") as refused:
                attachment.set_budget(weight_bytes(model))
            refusals.append(str(refused.value))

        handle = model.blocks[2].register_forward_hook(change)
        assert same_bits(run(model, x), expected)
        handle.remove()
        assert len(refusals) == 1
        with attachment.resident(model.blocks[1]), pytest.raises(StateError):
            attachment.set_budget(weight_bytes(model))
        inside, leave = threading.Event(), threading.Event()

        def wait(*_: object) -> None:
            inside.set()
            leave.wait(60)

        handle = model.blocks[0].register_forward_hook(wait)
        results: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: results.append(run(model, x)))
        thread.start()
        assert inside.wait(60)
        with pytest.raises(StateError, match="another thread runs the model"):
            attachment.set_budget(weight_bytes(model))
        leave.set()
        thread.join()
        handle.remove()
        assert same_bits(results[0], expected)
        attachment.set_budget(weight_bytes(model) * 2)
        assert same_bits(run(model, x), expected)


def test_after_an_error_in_a_forward_a_budget_can_be_changed() -> None:
    model = mlp()
    x = inputs()
    expected = run(model, x)
    with attached(model, 0.6) as attachment:
        run(model, x)

        def fail(*_: object) -> None:
            raise KeyboardInterrupt

        handle = model.blocks[3].up.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            run(model, x)
        handle.remove()
        attachment.set_budget(int(weight_bytes(model) * 0.9))
        assert same_bits(run(model, x), expected)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_what_streams_since_the_budget_was_lowered_is_right_out_of_turn(steps: int) -> None:
    model = mlp()
    x = torch.randn(2, 64)
    with torch.no_grad():
        expected = [block.up(x) for block in model.blocks]
    with attached(model, 3.0, device=host(poison=True)) as attachment, torch.no_grad():
        for _ in range(steps):
            run(model, inputs())
        assert attachment.report()["streamed_bytes_per_step"] == 0
        attachment.set_budget(int(weight_bytes(model) * 0.4))
        for _ in range(2):
            for block, bits in zip(model.blocks, expected):
                assert same_bits(block.up(x), bits)
            run(model, inputs())
        attachment.set_budget(weight_bytes(model) * 3)
        for block, bits in zip(model.blocks, expected):
            assert same_bits(block.up(x), bits)


def test_a_model_of_a_shared_device_takes_more_and_its_company_leaves_only_if_it_has_to() -> None:
    models, references, x = pipeline("transformer", "text_encoder")
    company = {"transformer": ["text_encoder"], "text_encoder": ["transformer"]}
    budgets = {"transformer": 0.4, "text_encoder": 0.3}
    with offload.all(
        models, quantizeTransformer=False, budgets=budgets, coTenantsMap=company, device=device("1536KiB")
    ) as managed:
        attachments = {name: managed.models[name].attachment for name in models}
        for _ in range(2):
            check(models, references, x)
        assert managed.loaded() == ["transformer", "text_encoder"]
        uploaded = attachments["text_encoder"].stats()["uploaded_bytes"]
        attachments["transformer"].set_budget("0.6MiB")
        assert managed.loaded() == ["transformer", "text_encoder"]
        for _ in range(2):
            check(models, references, x)
        assert attachments["text_encoder"].stats()["uploaded_bytes"] == uploaded
        attachments["transformer"].set_budget("1.5MiB")
        assert managed.loaded() == ["text_encoder"], "it ran last"
        for _ in range(2):
            check(models, references, x)
        attachments["transformer"].set_budget("0.4MiB")
        for _ in range(2):
            check(models, references, x)
        assert managed.loaded() == ["transformer", "text_encoder"]
    check(models, references, x)


def test_a_compiled_model_stays_compiled() -> None:
    compiles = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        compiles.append(graph)
        return graph.forward

    model = mlp(2)
    x = inputs()
    expected = run(model, x)
    for block in model.blocks:
        block.compile(backend=count)
    with attached(model, 0.9) as attachment:
        for share in (0.9, 1.5, 0.8):
            attachment.set_budget(int(weight_bytes(model) * share))
            for _ in range(3):
                assert same_bits(run(model, x), expected)
            if share == 0.9:
                warmed = len(compiles)
        assert len(compiles) == warmed, "another budget compiles nothing anew"


def test_a_budget_that_is_changed_while_the_model_is_away() -> None:
    model = mlp(8)
    x, whole = inputs(), weight_bytes(model)
    expected = run(model, x)
    settings = {"quantizeTransformer": False, "device": device(), "convertWeightsFloatTo": None}
    with offload.all({"one": model}, budgets=whole * 0.9 / 2**20, verboseLevel=0, **settings) as managed:
        run(model, x)
        run(model, x)
        attachment = managed.models["one"].attachment
        for share in (0.5, 2.0, 0.6):
            managed.unload_all()
            attachment.set_budget(int(whole * share))
            assert managed.loaded() == []
            for _ in range(2):
                assert same_bits(run(model, x), expected)
