"""Kernels of quantized weights from Python: what is said without a GPU, and on one the numbers of the CPU on PyTorch's streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from weightstream import _native
from weightstream.errors import DeviceError, NotAvailableError, QuantizationError


def gpu(test: Any) -> Any:
    """Marks a test for the gate."""
    skipped = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use")
    return pytest.mark.gpu(skipped(test))


NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
ROWS, COLUMNS = 48, 512


def described(*tensors: tuple[str, str, list[int]]) -> Any:
    """The one weight of a file with these tensors."""
    ((weight, _),), _, _ = _native.quant_detect(list(tensors), {}, lambda name: b"", [])
    return weight


def weights() -> list[tuple[Any, dict[str, torch.Tensor]]]:
    """Weights of several families and random parts whose floats are numbers."""
    generator = torch.Generator().manual_seed(3)

    def part(size: int) -> torch.Tensor:
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) & 0xBF

    elements = ROWS * COLUMNS
    return [
        (described(("w", "Q4_K", [ROWS, COLUMNS])), {"w": part(elements // 256 * 144)}),
        (described(("w", "IQ2_S", [ROWS, COLUMNS])), {"w": part(elements // 256 * 82)}),
        (described(("w", "Q8_0", [ROWS, COLUMNS])), {"w": part(elements // 32 * 34)}),
        (
            described(("w", "F8_E4M3", [ROWS, COLUMNS]), ("w_scale", "F32", [ROWS, 1])),
            {"w": part(elements), "w_scale": part(ROWS * 4)},
        ),
        (
            described(
                ("qweight", "I32", [COLUMNS // 8, ROWS]),
                ("qzeros", "I32", [COLUMNS // 128, ROWS // 8]),
                ("scales", "F16", [COLUMNS // 128, ROWS]),
            ),
            {
                "qweight": part(elements // 2),
                "qzeros": part(elements // 256),
                "scales": part(elements // 64),
            },
        ),
        (
            described(
                ("qweight", "I32", [COLUMNS, ROWS // 8]),
                ("qzeros", "I32", [COLUMNS // 128, ROWS // 8]),
                ("scales", "F16", [COLUMNS // 128, ROWS]),
            ),
            {
                "qweight": part(elements // 2),
                "qzeros": part(elements // 256),
                "scales": part(elements // 64),
            },
        ),
    ]


def given(parts: dict[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    return {name: (part.data_ptr(), part.nbytes) for name, part in parts.items()}


def wanted(weight: Any, parts: dict[str, torch.Tensor], rows: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The numbers by the CPU."""
    out = torch.empty(rows[1] - rows[0], COLUMNS, dtype=dtype)
    weight.dequantize(given(parts), [rows], out.data_ptr(), out.nbytes, NAMES[dtype])
    return out


def test_weights_have_kernels_and_machines_without_a_gpu_say_so() -> None:
    assert all(_native.DeviceKernels.supports(weight) for weight, _ in weights())
    with pytest.raises(DeviceError):
        _native.DeviceKernels(4711)


@gpu
@pytest.mark.parametrize("dtype", NAMES)
def test_numbers_are_the_cpus_on_the_stream_of_whoever_asks(dtype: torch.dtype) -> None:
    kernels = _native.DeviceKernels(0)
    stream = torch.cuda.Stream()
    for weight, parts in weights():
        kernels.prepare(weight, NAMES[dtype])
        for rows in ((0, ROWS), (5, 6), (ROWS, ROWS)):
            with torch.cuda.stream(stream):
                # Made on the same stream, behind work that takes a while: a launch elsewhere would read too early.
                torch.cuda._sleep(2_000_000)
                there = {name: part.cuda(non_blocking=True) for name, part in parts.items()}
                out = torch.full((rows[1] - rows[0], COLUMNS), -7.0, dtype=dtype, device="cuda")
                kernels.dequantize(weight, given(there), rows, out.data_ptr(), NAMES[dtype], stream.cuda_stream)
                again = out * 1
            stream.synchronize()
            assert torch.equal(again.cpu(), wanted(weight, parts, rows, dtype)), (weight, rows)


@gpu
def test_what_cannot_be_submitted_is_told_apart() -> None:
    kernels = _native.DeviceKernels(0)
    weight, parts = weights()[3]
    there = {name: part.cuda() for name, part in parts.items()}
    out = torch.empty(ROWS, COLUMNS, device="cuda")
    call = (weight, given(there), (0, ROWS), out.data_ptr(), "F32", 0)
    kernels.dequantize(*call)
    odd = given(there) | {"w_scale": (there["w_scale"].data_ptr() + 1, there["w_scale"].nbytes)}
    with pytest.raises(NotAvailableError, match="multiple of 4"):
        kernels.dequantize(weight, odd, *call[2:])
    short = given(there) | {"w_scale": (there["w_scale"].data_ptr(), 4)}
    with pytest.raises(QuantizationError, match="has 4 bytes and needs"):
        kernels.dequantize(weight, short, *call[2:])
    with pytest.raises(NotAvailableError, match="F64"):
        kernels.dequantize(weight, given(there), (0, ROWS), out.data_ptr(), "F64", 0)
    torch.cuda.synchronize()


@gpu
def test_a_launch_is_captured_into_a_graph() -> None:
    kernels = _native.DeviceKernels(0)
    weight, parts = weights()[0]
    there = {name: part.cuda() for name, part in parts.items()}
    out = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device="cuda")
    kernels.prepare(weight, "BF16")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        kernels.dequantize(weight, given(there), (0, ROWS), out.data_ptr(), "BF16", stream)
    out.fill_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), wanted(weight, parts, (0, ROWS), torch.bfloat16))
