"""Whole pipelines on a GPU: models that take turns, the same bits, nothing left behind."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from pipeline_models import Model
from shared_models import Guided

from weightstream import offload, profile_type, runtime

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def models() -> dict[str, Model]:
    torch.manual_seed(0)
    shapes = {"transformer": (2048, 24), "text_encoder": (1536, 12), "vae": (512, 4)}
    return {name: Model(*shape).eval() for name, shape in shapes.items()}


@torch.inference_mode()
def test_models_take_turns_with_the_resident_bits_and_nothing_grows() -> None:
    pipe = models()
    references = {name: copy.deepcopy(model).bfloat16().cuda() for name, model in pipe.items()}
    inputs = {name: torch.randn(64, model.first.in_features).bfloat16() for name, model in pipe.items()}
    budgets = {"transformer": 200, "*": 120}
    with offload.profile(pipe, profile_type.HighRAM_LowVRAM, 0, quantizeTransformer=False, budgets=budgets):
        torch.cuda.synchronize()
        free: list[int] = []
        for generation in range(50):
            for name in ("text_encoder", "transformer", "transformer", "vae"):
                # Arguments in CPU memory go to the device with the call.
                got = pipe[name](inputs[name])
                assert got.device.type == "cuda"
                assert torch.equal(got, references[name](inputs[name].cuda())), (generation, name)
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info()[0])
        assert free[-1] >= free[1] - (8 << 20), (free[1], free[-1])
        assert runtime.execution_device(pipe["text_encoder"].blocks[0]).type == "cuda"
        assert pipe["transformer"].scale.device.type == "cuda"
    assert all(tensor.device.type == "cpu" for model in pipe.values() for tensor in model.state_dict().values())


@torch.inference_mode()
def test_a_switch_takes_about_the_transfer_of_what_is_missing() -> None:
    pipe = models()
    inputs = {name: torch.randn(4, model.first.in_features).bfloat16() for name, model in pipe.items()}
    settings = {"quantizeTransformer": False, "budgets": 0, "coTenantsMap": {}}
    with offload.profile(pipe, profile_type.HighRAM_LowVRAM, 0, **settings) as managed:
        for name in pipe:
            pipe[name](inputs[name])
        torch.cuda.synchronize()
        for name in ("transformer", "text_encoder", "transformer"):
            attachment = managed.models[name].attachment
            before = attachment.stats()["uploaded_bytes"]
            begun = time.monotonic()
            runtime.ensure_loaded(pipe[name])
            seconds = time.monotonic() - begun
            moved = attachment.stats()["uploaded_bytes"] - before
            assert moved > 0
            print(f"{name}: {moved / 1e9:.2f} GB in {seconds * 1e3:.1f} ms, {moved / seconds / 1e9:.1f} GB/s")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_the_second_gpu_uses_it() -> None:
    pipe = models()
    pipe["vae"].to("cuda:1")
    with offload.profile(pipe, profile_type.LowRAM_LowVRAM, 0, quantizeTransformer=False, device="cuda:0"):
        assert runtime.execution_device(pipe["vae"]) == torch.device("cuda:1")
        assert runtime.execution_device(pipe["transformer"]) == torch.device("cuda:0")
        with torch.inference_mode():
            assert pipe["vae"](torch.randn(1, 512).bfloat16()).device == torch.device("cuda:1")


@torch.inference_mode()
def test_models_that_are_on_the_gpu_are_set_up_from_there() -> None:
    pipe = {name: model for name, model in models().items() if name != "text_encoder"}
    inputs = {name: torch.randn(8, model.first.in_features).bfloat16() for name, model in pipe.items()}
    references = {name: copy.deepcopy(model) for name, model in pipe.items()}
    with offload.all(references, device="host", quantizeTransformer=True, verboseLevel=0):
        pass  # its weights are what they will be
    for model in (*references.values(), *pipe.values()):
        model.cuda()
    with offload.all(pipe, quantizeTransformer=True, budgets={"transformer": 150, "*": 40}) as managed:
        for _ in range(2):
            for name, model in pipe.items():
                assert torch.equal(model(inputs[name]), references[name](inputs[name].cuda())), name
        assert managed.models["transformer"].attachment.stats()["copies"] > 0
    assert all(tensor.device.type == "cpu" for model in pipe.values() for tensor in model.state_dict().values())


@torch.inference_mode()
def test_an_encoder_of_two_models_streams_for_both_with_the_resident_bits() -> None:
    torch.manual_seed(3)
    pipe: dict[str, Guided] = dict(zip(("prior", "decoder"), (Guided(m, 12, 1024) for m in [Model(1024, 16)] * 2)))
    references = {name: copy.deepcopy(model).bfloat16().cuda() for name, model in pipe.items()}
    x = torch.randn(32, 1024).bfloat16()
    budgets = {"prior": 60, "decoder": 60}
    with offload.all(pipe, quantizeTransformer=False, pinnedMemory=True, budgets=budgets, coTenantsMap={}) as managed:
        for generation in range(6):
            for name in ("prior", "prior", "decoder"):
                for module in (*pipe[name].modules(), *references[name].modules()):
                    if isinstance(module, Model):
                        module.scale.fill_(1)  # which a forward of either writes
                assert torch.equal(pipe[name](x), references[name](x.cuda())), (generation, name)
        assert managed.shared["prior+decoder"].attachment.stats()["copies"] > 0
        addresses = {model.encoder.blocks[0].up.weight.data_ptr() for model in pipe.values()}
        assert len(addresses) == 1
    assert pipe["prior"].encoder.first.weight.device.type == "cpu"
