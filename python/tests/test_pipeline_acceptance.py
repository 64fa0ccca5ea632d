"""What whole pipelines promise, a promise a test: settings of the profiles, what a budget holds, order, pinning, callbacks, nothing global."""

from __future__ import annotations

import copy
import gc
import json
import os
from typing import Any

import pytest
import torch
from pipeline_models import Block, Model, Pipeline, check, device, pipeline, set_up
from torch import Tensor, nn

from weightstream import LoadingCancelled, offload, profile_type
from weightstream._native import share_reserved
from weightstream.offload.choosing import is_quantized

MEGABYTE = 1 << 20


class T5Model(Model):
    """An encoder whose Python module says that it is a language model."""


T5Model.__module__ = "transformers.models.t5.modeling_t5"


@pytest.mark.parametrize(
    ("number", "pinned", "transformer", "quantized", "preloads"),
    [
        (profile_type.HighRAM_HighVRAM, True, 1200, {"transformer"}, True),
        (profile_type.HighRAM_LowVRAM, True, 1200, {"transformer"}, False),
        (profile_type.LowRAM_HighVRAM, "transformer", 1200, {"transformer", "text_encoder_2"}, True),
        (profile_type.LowRAM_LowVRAM, "transformer", 1200, {"transformer", "text_encoder_2"}, False),
        (profile_type.VerylowRAM_LowVRAM, False, 400, {"transformer", "text_encoder_2"}, False),
    ],
)
def test_what_each_profile_sets(
    number: int, pinned: Any, transformer: int, quantized: set[str], preloads: bool
) -> None:
    models, _, _ = pipeline()
    models["text_encoder_2"].__class__ = T5Model
    with offload.profile(models, number, 0, device=device()) as managed:
        parameters = managed.parameters
        assert parameters.pinnedMemory == pinned
        assert parameters.budgets == {"transformer": transformer, "*": 3000}
        assert parameters.autoPreload is preloads
        assert parameters.quantizeTransformer and parameters.asyncTransfers and not parameters.preloadExperts
        assert {name for name, model in models.items() if is_quantized(model)} == quantized
    models, _, _ = pipeline()
    overrides: dict[str, Any] = {
        "pinnedMemory": ["vae"],
        "budgets": {"vae": "50%"},
        "quantizeTransformer": False,
        "extraModelsToQuantize": None,
        "autoPreload": False,
        "asyncTransfers": False,
    }
    with offload.profile(models, number, 0, device=device(), **overrides) as managed:
        for name, value in overrides.items():
            assert getattr(managed.parameters, name) == value
        assert managed.parameters.preloadExperts, "where budgets are given"
        assert not any(is_quantized(model) for model in models.values())


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_star_counts_at_any_verbosity_and_a_number_for_all(level: int) -> None:
    for settings, most in (
        ({"workingVRAM": {"*": 15.7}}, 0.3),
        ({"budgets": {"*": 0.25}}, 0.25),
        ({"budgets": 0.25}, 0.25),
        ({"budgets": "2%"}, 0.32),
    ):
        models, references, inputs = pipeline("transformer", "text_encoder")
        with set_up(models, verboseLevel=level, **{"budgets": 0, **settings}) as managed:
            for name in models:
                engine = managed.models[name].attachment.report()["engine"]
                assert 0 < (engine["own_pages"] + engine["ring_pages"]) * engine["page_bytes"] <= most * MEGABYTE
            check(models, references, inputs)


@pytest.mark.parametrize("budgets", [0, 10, "90%", {"transformer": 5}])
def test_a_model_that_fits_its_budget_is_copied_once(budgets: Any) -> None:
    models, references, inputs = pipeline("transformer")
    with set_up(models, budgets=budgets) as managed:
        attachment = managed.models["transformer"].attachment
        check(models, references, inputs)
        before = attachment.stats()
        for _ in range(3):
            check(models, references, inputs)
        after = attachment.stats()
        assert after["copies"] == before["copies"] == 0
        assert after["uploaded_bytes"] == before["uploaded_bytes"]
        assert attachment.report()["streamed_bytes_per_step"] == 0


class Uneven(Model):
    """Blocks of which one is four times as wide inside."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__(width, blocks)
        odd = Block(width)
        odd.up, odd.down = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)
        odd.forward = lambda x: x + odd.down(torch.relu(odd.up(odd.norm(x))))
        self.blocks[3] = odd


def test_what_is_resident_is_spread_and_one_odd_block_does_not_void_it() -> None:
    torch.manual_seed(2)
    model = Uneven(64, 10).eval()
    reference = copy.deepcopy(model)
    odd = reference.blocks[3]
    odd.forward = lambda x: x + odd.down(torch.relu(odd.up(odd.norm(x))))
    reference.bfloat16()
    x = {"transformer": torch.randn(2, 64).bfloat16()}
    budget = 0.36
    with set_up({"transformer": model}, budgets=budget) as managed:
        for _ in range(3):
            check({"transformer": model}, {"transformer": reference}, x)
        report = managed.models["transformer"].attachment.report()
        engine = report["engine"]
        held = (engine["own_pages"] + engine["ring_pages"]) * engine["page_bytes"]
        assert 0.85 * budget * MEGABYTE < held <= budget * MEGABYTE, "the budget is used"
        block_of = [unit["name"].split("[")[0] for unit in engine["units"]]
        resident: dict[str, int] = {}
        for name, unit in zip(block_of, engine["units"]):
            resident[name] = resident.get(name, 0) + unit["bytes"] - unit["streamed_bytes"]
        usual = [resident[f"blocks.{number}"] for number in range(10) if number != 3]
        assert sum(usual[:5]) > 0 and sum(usual[4:]) > 0, "not a beginning alone, nor an end"
        assert max(usual) - min(usual) <= 3 * engine["page_bytes"] or sum(size > 0 for size in usual) >= 5


@pytest.mark.parametrize("company", [{}, None, {"transformer": ["vae"], "vae": ["transformer"]}])
def test_weights_on_the_device_never_exceed_the_budgets_of_who_is_there(company: Any) -> None:
    models, references, inputs = pipeline()
    budgets = {"transformer": 0.4, "text_encoder": 0.3, "text_encoder_2": 0.25, "vae": 0.2}
    with set_up(models, budgets=budgets, coTenantsMap=company) as managed:
        group = managed.models["vae"].group
        together = {name: managed.models[name].attachment.budget for name in models}
        most = max(together.values())
        if company is None:
            most = together["text_encoder"] + together["text_encoder_2"] + together["vae"]
        elif company:
            most = together["transformer"] + together["vae"]
        for _ in range(3):
            check(models, references, inputs)
            check(models, references, inputs, *reversed(list(models)))
        assert 0 < group.report()["page_bytes_peak"] <= most


class TwoTowers(nn.Module):
    """Two lists of blocks that run in turn, from the last to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(Block(64) for _ in range(5))
        self.right = nn.ModuleList(Block(64) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for one, other in zip(reversed(self.left), self.right):
            x = other(one(x))
        return x


def test_after_the_first_step_nothing_is_fetched_on_demand() -> None:
    torch.manual_seed(6)
    model = TwoTowers().eval()
    models = {"transformer": model}
    references = {"transformer": copy.deepcopy(model).bfloat16()}
    x = {"transformer": torch.randn(2, 64).bfloat16()}
    with set_up(models, budgets=0.15) as managed:
        attachment = managed.models["transformer"].attachment
        for _ in range(2):  # the second has learned the order, and the first step's cuts
            check(models, references, x)
        before = attachment.stats()
        for _ in range(4):
            check(models, references, x)
        after = attachment.stats()
        assert after["copies"] > before["copies"]
        assert after["fetched_on_demand"] == before["fetched_on_demand"]
        assert after["replans"] == before["replans"]


@pytest.mark.parametrize("settings", [{"prefetchWindow": n} for n in (0, 1, 2, 7)] + [{"asyncTransfers": False}])
def test_every_prefetch_window_gives_the_same_bits_and_none_copies_ahead_of_it(settings: dict[str, Any]) -> None:
    models, references, inputs = pipeline("transformer")
    with set_up(models, budgets=0.6, **settings) as managed:
        for _ in range(3):
            check(models, references, inputs)
        engine = managed.models["transformer"].attachment.report()["engine"]
        window = settings.get("prefetchWindow", 0)
        assert engine["look_ahead"] <= window
        assert (engine["look_ahead"] == 0) == (window == 0)
        stats = engine["stats"]
        if window == 0:
            assert stats["fetched_on_demand"] > 0
        assert (engine["own_pages"] + engine["ring_pages"]) * engine["page_bytes"] <= 0.6 * MEGABYTE


def test_twenty_set_ups_and_releases_leave_nothing() -> None:
    models, references, inputs = pipeline("transformer", "text_encoder", "vae")
    place = device()
    levels = []
    for _ in range(20):
        managed = set_up(models, device=place, pinnedMemory=True, autoPreload={})
        target = managed.models["vae"].group.target.native
        check(models, references, inputs)
        assert sum(report["host"]["registered_bytes"] for report in managed.report().values()) > 0
        managed.release()
        del managed
        gc.collect()  # with it goes the page that stood behind addresses
        threads = len(os.listdir("/proc/self/task"))
        levels.append((target.free_memory(), target.total_memory, len(os.listdir("/proc/self/fd")), threads))
    assert all(free == total for free, total, _, _ in levels)
    assert levels[-1][2:] <= levels[2][2:], levels
    check(models, references, inputs)


def test_reserved_ram_that_is_short_goes_to_blocks_that_are_spread() -> None:
    gigabyte = 1 << 30
    blocks = [(gigabyte // 64, True)] * 16
    _, _, _, most = share_reserved([], 0.5, 0)
    few = [(most // 8, True)] * 16  # half of them fit
    ((locked, rest),) = share_reserved([("whole", 0, few, gigabyte)], 0.5, 0)[0]
    count = sum(locked)
    assert 4 <= count <= 8 and not rest
    places = [number for number, is_locked in enumerate(locked) if is_locked]
    gaps = [after - before for before, after in zip(places, places[1:])]
    assert max(gaps) <= 3 and places[-1] >= 12 and places[0] <= 3, "not a prefix"
    ((locked, _),) = share_reserved([("one in", 4, blocks, 0)], 0.9, 0)[0]
    assert sum(locked) == 4


def test_what_is_locked_stays_below_the_limit_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    models, references, inputs = pipeline("transformer", "text_encoder", "vae")
    total = sum(2 * parameter.numel() for model in models.values() for parameter in model.parameters())
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    _, _, _, most = share_reserved([], 0.5, 0)
    share = 0.5 * (total * 0.7) / min(most, physical)
    with set_up(models, pinnedMemory=True, perc_reserved_mem_max=share) as managed:
        reports = managed.report().values()
        locked = sum(report["host"]["registered_bytes"] for report in reports)
        _, _, _, limit = share_reserved([], share, 0)
        assert locked <= limit < total
        assert sum(report["host"]["pageable_bytes"] for report in reports) > 0
        for _ in range(2):
            check(models, references, inputs)


@pytest.mark.parametrize("quantizes", [False, True])
def test_a_callback_hears_every_phase_in_order_up_to_the_total_and_may_stop_each(quantizes: bool) -> None:
    heard: list[tuple[str, int, int, str]] = []
    stop: list[int] = []
    callback = offload.LoadingCallback(lambda: bool(stop) and len(heard) > stop[0], lambda *call: heard.append(call))

    def managed_of(models: Any) -> offload.OffloadObject:
        return set_up(models, loading_callback=callback, quantizeTransformer=quantizes, budgets=0.2)

    models, references, inputs = pipeline("transformer", "vae")
    if quantizes:
        offload.quantize(references["transformer"])
    managed_of(models).release()
    total = 8 + quantizes
    own = [call for call in heard if call[2] == total and call[0] != "Pinning"]
    if not quantizes:
        assert [completed for _, completed, _, _ in own] == list(range(total)) + [total]
    assert own[-1] == ("Finalization", total, total, "vae")
    order = ["Preparing", "Quantization", "Scanning Sizes", "Hooks and LoRA Slots", "Finalization"]
    phases = [phase for phase, *_ in heard if phase in order]
    assert [phase for phase in order if phase in phases] == [order[i] for i in range(5) if quantizes or i != 1]
    assert phases.index("Scanning Sizes") > max(i for i, phase in enumerate(phases) if phase == "Preparing")
    count = len(heard)
    for number in range(count):
        fresh, references, inputs = pipeline("transformer", "vae")
        if quantizes:
            offload.quantize(references["transformer"])
        pipe = Pipeline(**fresh)
        heard.clear()
        stop[:] = [number]
        with pytest.raises(LoadingCancelled):
            managed_of(pipe)
        assert not any("_weightstream" in part.__dict__ for model in fresh.values() for part in model.modules())
        assert "to" not in pipe.__dict__
        stop.clear()
        with managed_of(pipe):
            check(fresh, references, inputs)


def test_nothing_global_changes_while_a_pipeline_is_managed() -> None:
    watched = [torch, torch.Tensor, nn.Module, nn.Parameter, nn.Linear, torch.nn.functional, Model, Block]
    models, references, inputs = pipeline("transformer", "vae")
    before = {(owner, name): value for owner in watched for name, value in vars(owner).items()}
    settings = torch.get_default_device(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
    with set_up(models):
        check(models, references, inputs)
        now = {(owner, name): value for owner in watched for name, value in vars(owner).items()}
        changed = [name for (owner, name), value in before.items() if now.get((owner, name)) is not value]
        assert changed == []
        assert settings == (
            torch.get_default_device(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
        )


def test_a_method_of_a_direct_child_brings_the_model() -> None:
    models, references, inputs = pipeline("transformer", "vae")

    class Outer(nn.Module):
        def __init__(self, decoder: nn.Module) -> None:
            super().__init__()
            self.decoder, self.scale = decoder, nn.Parameter(torch.full((64,), 0.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(x) * self.scale

    outer = Outer(models["vae"])
    outer.decoder._offload_hooks = ["decode"]
    everything = {"transformer": models["transformer"], "vae": outer}
    with set_up(everything, coTenantsMap={}) as managed, torch.no_grad():
        steps = managed.models["vae"].attachment.stats()["steps"]
        check(models, references, inputs, "transformer")
        got = outer.decoder.decode(inputs["vae"])
        assert torch.equal(got, references["vae"].decode(inputs["vae"]))
        assert managed.loaded() == ["vae"]
        assert managed.models["vae"].attachment.stats()["steps"] == steps + 1, "it is a step, with its order"


def test_separate_blocks_are_loaded_only_while_they_run() -> None:
    models, references, inputs = pipeline("text_encoder")
    encoder = models["text_encoder"]
    encoder._offload_separate_blocks = ("first", "last")
    with set_up(models, budgets=0.08) as managed:
        attachment = managed.models["text_encoder"].attachment
        for _ in range(2):
            check(models, references, inputs)
        units = {unit["name"]: unit for unit in attachment.report()["engine"]["units"]}
        assert units["first"]["streamed_bytes"] > 0 and units["last"]["streamed_bytes"] > 0
        copies = json.loads(attachment._runtime.offloader.stats())["copied_bytes"]
        with torch.no_grad():
            encoder.blocks[2](inputs["text_encoder"])
        again = json.loads(attachment._runtime.offloader.stats())["copied_bytes"]
        assert again - copies < attachment.report()["model_bytes"] / 2, "a block alone does not bring them"
