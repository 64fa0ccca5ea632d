"""One graph of models with packed weights, adapters, shared devices and several ways in."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from attach_models import MlpBlock, Towered, host, mlp, run, same_bits, transformer
from attach_models import inputs as small_inputs
from lora_models import adapter, inputs, model
from pipeline_models import device, set_up
from whole_models import ONE_GRAPH, stored

import weightstream
from weightstream import offload

pytestmark = ONE_GRAPH


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("base", ["f32", "int8"])
def test_adapters_that_change_from_step_to_step(base: str, backend: str, tmp_path: Path) -> None:
    x, multipliers = inputs(), (0.5, 0.0, 1.0, 0.5)
    path = adapter("lora").write(tmp_path / "a.safetensors")

    def results(compiles: bool) -> list[torch.Tensor]:
        made = model(base)
        with weightstream.attach(made, device=host("lazy"), budget=int(stored(made) * 0.9)) as attachment:
            if compiles:
                attachment.compile(backend=backend)
            offload.load_loras_into_model(made, path, [list(multipliers)])
            found = []
            for step in (*range(len(multipliers)), *range(len(multipliers))):
                offload.set_step_no_for_lora(made, step)
                found.append(run(made, x))
            assert attachment.stats()["copied_bytes"] > 0
            return found[len(multipliers) :]

    expected = results(compiles=False)
    torch._dynamo.utils.counters.clear()
    for got, wanted in zip(results(compiles=True), expected):
        torch.testing.assert_close(got, wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("base", ["int8"])
def test_packed_weights(base: str) -> None:
    x, made = inputs(), model(base)
    expected = run(made, x)
    with weightstream.attach(made, device=host("lazy"), budget=int(stored(made) * 0.6)) as attachment:
        attachment.compile(backend="aot_eager")
        for _ in range(3):
            assert same_bits(run(made, x), expected)
        assert attachment.stats()["copied_bytes"] > 0
    assert same_bits(run(made, x), expected)


class Writing(Towered):
    """Writes a buffer in its forward."""

    def __init__(self) -> None:
        super().__init__([MlpBlock() for _ in range(5)])
        self.register_buffer("scale", torch.ones(64, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x) * self.scale
        for block in self.blocks:
            x = block(x)
        self.scale += 0.5
        return self.head(x)


@pytest.mark.parametrize("together", [False, True])
def test_models_that_share_a_device(together: bool) -> None:
    torch.manual_seed(0)
    models = {"transformer": Writing().eval(), "text_encoder": transformer(), "vae": mlp()}
    references = {name: copy.deepcopy(made).bfloat16() for name, made in models.items()}
    x = small_inputs().bfloat16()
    company = {} if not together else {"coTenantsMap": {name: "*" for name in models}}
    with set_up(models, budgets=0.6, device=device(order="lazy"), **company) as managed:
        for name, made in models.items():
            made._weightstream.compile(backend="aot_eager")
        for names in (list(models), list(models)[::-1], ["vae", "vae", "transformer", "vae"], list(models)):
            for name in names:
                assert same_bits(run(models[name], x), run(references[name], x)), name
            managed.unload_all()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    for name, made in models.items():
        assert same_bits(run(made, x), run(references[name], x)), name


def test_another_method_runs_uncompiled() -> None:
    class Two(Towered):
        def decode(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    models = {"transformer": mlp(), "vae": Two([MlpBlock() for _ in range(5)]).eval()}
    reference = copy.deepcopy(models["vae"]).bfloat16()
    x, y = small_inputs().bfloat16(), torch.randn(2, 5, 64).bfloat16()
    with set_up(models, budgets=0.6, device=device(order="lazy")):
        vae = models["vae"]
        vae._weightstream.compile(backend="aot_eager")
        with torch.inference_mode():
            for _ in range(3):
                assert same_bits(vae(x), reference(x))
                assert same_bits(vae.decode(y), reference.decode(y))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
