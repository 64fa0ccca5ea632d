"""What both examples need around what they measure: arguments, the process group, the checks. Imports nothing that is timed."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def parser(description: str, model: str) -> argparse.ArgumentParser:
    """The arguments that both have."""
    made = argparse.ArgumentParser(description=description)
    source = made.add_mutually_exclusive_group(required=True)
    source.add_argument("--model-path", type=Path, help=f"{model}; nothing is downloaded")
    source.add_argument(
        "--tiny", action="store_true", help="a model of random weights instead, made before anything is timed"
    )
    made.add_argument("--output", type=Path, required=True, help="where the report goes, as JSON")
    made.add_argument("--tensor-output", type=Path, help="where the output goes (.pt), to compare with other runs")
    made.add_argument("--synchronize", action="store_true", help="wait for the device at both ends of each phase")
    made.add_argument("--device", default="auto", help="auto: cuda if there is one, else cpu")
    return made


@contextmanager
def model_folder(options: argparse.Namespace, part: str = "") -> Iterator[Path]:
    """The model's folder. A tiny one is made by another process, so that nothing is imported here, and removed in the end."""
    if not options.tiny:
        yield options.model_path
        return
    with tempfile.TemporaryDirectory() as folder:
        maker = Path(__file__).with_name("tiny_wan.py")
        subprocess.run([sys.executable, str(maker), folder], check=True, stdout=subprocess.DEVNULL)
        yield Path(folder) / part


def choose_device(asked: str) -> str:
    """The device to use."""
    import torch

    if asked != "auto":
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"


def join_group(device: str) -> None:
    """Makes the process group of this one process, at the launcher's rendezvous if there is one, else at a port that is free."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device) if ":" in device else torch.device("cuda", 0))
        torch.cuda.init()
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    for name, value in [("MASTER_ADDR", "127.0.0.1"), ("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")]:
        os.environ.setdefault(name, value)
    backend = "nccl" if device.startswith("cuda") and torch.distributed.is_nccl_available() else "gloo"
    torch.distributed.init_process_group(backend)


def leave_group() -> None:
    """Ends the process group."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def check(what: str, found: Any, wanted: Any) -> None:
    """Ends the run unless both are equal: a report of something else is worth nothing."""
    if found != wanted:
        raise SystemExit(f"{what} is {found}, and {wanted} was asked for")


def check_output(output: Any, shape: tuple[int, ...], target: Path | None) -> None:
    """Checks shape and finiteness, which say nothing of quality, and saves the tensor if that was asked for."""
    import torch

    check("the output's shape", tuple(output.shape), shape)
    check("whether all of the output is finite", bool(torch.isfinite(output).all()), True)
    if target is not None:
        torch.save(output.detach().cpu().contiguous(), target)
