"""Recording changes no bit, and loads no compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from planning_replay import record
from recorder_models import DEVICES, SEQUENCE, WIDTH, linear, model_of


def attention(kind: str):
    def run(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x)))
        mask = x.new_ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if kind == "mask" else None
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=kind == "causal").transpose(1, 2).flatten(2)

    return model_of(run, q=linear, k=linear, v=linear)


@pytest.mark.parametrize("length", [1, 7, 64])
@pytest.mark.parametrize("kind", ["plain", "causal", "mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_attention_gives_the_same_bits(kind, length, dtype, device):
    model = attention(kind).to(device, dtype)
    x = torch.randn(2, length, WIDTH, dtype=dtype, device=device)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            expected = model(x)
            assert torch.equal(record(model, lambda: model(x))[2], expected)


@pytest.mark.parametrize(
    "run",
    [
        lambda self, x: torch.einsum("bsi,oi->bso", x, self.a.weight),
        lambda self, x: x @ self.a.weight.t() + x.transpose(0, 1).contiguous().transpose(0, 1) @ self.a.weight,
        lambda self, x: F.layer_norm(self.a(x), (WIDTH,), self.a.weight[0], self.a.weight[1]),
        lambda self, x: F.conv1d(x.transpose(1, 2), self.a.weight.view(WIDTH, WIDTH, 1)).transpose(1, 2),
        lambda self, x: F.group_norm(self.a(x).transpose(1, 2), 4, self.a.weight[0]).transpose(1, 2),
        lambda self, x: F.bilinear(x, x, self.a.weight.view(1, WIDTH, WIDTH).expand(WIDTH, -1, -1)),
        lambda self, x: F.gelu(F.linear(x[:, :1].expand(-1, 5, -1), self.a.weight)),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_operators_with_several_ways_give_the_same_bits(run, device):
    model = model_of(run, a=linear).to(device)
    sequence = SEQUENCE.to(device)
    for x in (sequence, sequence[:, :1], sequence.transpose(0, 1)[:2]):
        expected = model(x)
        assert torch.equal(record(model, lambda x=x: model(x))[2], expected)


def test_recording_does_not_load_the_compiler():
    code = """
import sys, torch
from torch import nn
from weightstream.ownership import collect
from weightstream.recorder import Recorder
from weightstream.towers import find_towers
model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
recorder = Recorder(collect(model, find_towers(model)))
with recorder.recording():
    model(torch.ones(1, 4))
assert len(recorder.trace().seen) == 10
assert "torch._dynamo" not in sys.modules
"""
    if getattr(sys.modules["weightstream"], "__file__", None) is None:
        pytest.skip("needs the installed package in a process of its own")
    subprocess.run([sys.executable, "-c", code], check=True)
