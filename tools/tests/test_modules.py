"""The kernels' PTX through the compiler that drivers have inside, as a library: nothing is refused, and nothing goes to slow memory."""

import ctypes
import importlib.util
import os
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "crates/quant-kernels/kernels").glob("*.ptx"))
# nvJitLink's name for PTX.
PTX = 2


class Linker:
    """nvJitLink of PyTorch's packages."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.version = "_".join(re.search(r"so\.(\d+)", path.name).groups())

    def call(self, name, *arguments):
        for minor in range(10):
            function = getattr(self.library, f"__nvJitLink{name}_{self.version}_{minor}", None)
            if function is not None:
                return function(*arguments)
        return getattr(self.library, f"nvJitLink{name}")(*arguments)

    def text(self, name, link):
        size = ctypes.c_size_t()
        self.call(f"Get{name}LogSize", link, ctypes.byref(size))
        text = ctypes.create_string_buffer(max(size.value, 1))
        self.call(f"Get{name}Log", link, text)
        return text.value.decode(errors="replace")

    def compile(self, module, device):
        """What the compiler says of a module; a refusal fails the test."""
        link = ctypes.c_void_p()
        options = (ctypes.c_char_p * 2)(f"-arch={device}".encode(), b"-verbose")
        assert self.call("Create", ctypes.byref(link), 2, options) == 0
        code = module.read_bytes() + b"\0"
        added = self.call("AddData", link, PTX, code, ctypes.c_size_t(len(code)), module.name.encode())
        done = added or self.call("Complete", link)
        said = self.text("Error", link) + self.text("Info", link)
        self.call("Destroy", ctypes.byref(link))
        assert done == 0, said
        return said


@pytest.fixture(scope="module")
def linker():
    spec = importlib.util.find_spec("nvidia")
    folders = [pathlib.Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    found = [path for folder in folders for path in sorted(folder.glob("*/lib/libnvJitLink.so.*"))]
    if not found:
        assert os.environ.get("WEIGHTSTREAM_REQUIRE_PACKAGES") != "1" or not spec, "PyTorch's packages lack nvJitLink"
        pytest.skip("nvJitLink is not installed")
    return Linker(found[0])


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_a_module_is_taken_and_keeps_its_numbers_in_registers(linker, module):
    said = linker.compile(module, "sm_90")
    kernels = module.read_text().count(".visible .entry ")
    used = [int(count) for count in re.findall(r"Used (\d+) registers", said)]
    assert len(used) >= kernels > 0, said
    # Of 65536 registers, so that two blocks of 256 threads have room beside each other.
    assert max(used) <= 128, said
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill (?:stores|loads)", said)]
    assert not any(spilled), said


def test_every_module_is_seen():
    assert len(MODULES) == len(list((ROOT / "crates/quant-kernels/kernels").glob("*.cu"))) > 0
