"""Importing does nothing, and a process that never detaches ends by itself."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def python(script: str, *options: str) -> str:
    """Runs a script in a process of its own and gives what it printed."""
    command = [sys.executable, *options, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_importing_patches_nothing_and_starts_nothing() -> None:
    python("""
        import threading, os, sys, torch
        from torch import nn

        def functions():
            watched = [torch, torch.Tensor, nn.Module, nn.Parameter, torch.nn.functional, torch.cuda, copyreg]
            return {(id(owner), name): id(vars(owner)[name]) for owner in watched for name in list(vars(owner))}

        import copyreg
        before = functions()
        threads = len(os.listdir("/proc/self/task"))
        import weightstream
        now = functions()
        assert all(now[key] == value for key, value in before.items())
        assert set(now) - set(before) == set() or all(key[0] == id(torch) for key in set(now) - set(before))
        assert len(os.listdir("/proc/self/task")) == threads
        assert not torch.cuda.is_initialized()
        assert torch.get_default_device() == torch.device("cpu")
        assert "torch._dynamo" not in sys.modules
    """)


MODEL = """
    import torch, weightstream
    from torch import nn
    torch.set_num_threads(1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model = Model()
    x = torch.randn(2, 64)
    with torch.inference_mode():
        expected = model(x)
    device = weightstream.HostDevice(bytes="16MiB", granularity=4096, order="lazy", poison=True)
    attachment = weightstream.attach(model, device=device, budget="64KiB")
"""


def test_a_process_that_never_detaches_ends() -> None:
    python(
        MODEL
        + """
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    """
    )


def test_a_process_that_ends_in_the_middle_of_a_forward_ends() -> None:
    python(
        MODEL
        + """
    import sys
    inner = model.blocks[3].forward
    model.blocks[3].forward = lambda h: sys.exit(0)
    model(x)
    """
    )


def test_without_assertions_it_works_the_same() -> None:
    python(
        MODEL
        + """
    with torch.inference_mode():
        for _ in range(3):
            if not torch.equal(model(x), expected):
                raise SystemExit(1)
    attachment.detach()
    if not torch.equal(model(x), expected):
        raise SystemExit(2)
    """,
        "-O",
    )


def test_a_forked_child_ends_and_lets_the_model_go() -> None:
    python(
        MODEL
        + """
    import gc, os, signal
    with torch.inference_mode():
        model(x)
    children = []
    for drops in (False, True):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            if drops:
                del model, attachment
                gc.collect()
            raise SystemExit(0)
        children.append(child)
    for child in children:
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise SystemExit(1)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    """
    )
