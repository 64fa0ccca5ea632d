"""Compiles CUDA sources to PTX through NVRTC: `nvrtc.py --out FOLDER --option=… SOURCE…`. Headers are those beside a source.

A source's PTX goes to FOLDER under the source's name; what the compiler says goes to the terminal. The kernels include no header
of CUDA, so that NVRTC's own package is all that is needed.
"""

import argparse
import ctypes
import pathlib
import sys


def main():
    """Compiles each source; exit status 1 if one cannot be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("sources", type=pathlib.Path, nargs="+")
    options = parser.parse_args()
    library = load()
    options.out.mkdir(parents=True, exist_ok=True)
    for source in options.sources:
        text, log = compiled(library, source, options.option)
        if log.strip():
            print(log, file=sys.stderr)
        if text is None:
            print(f"{source.name} cannot be compiled", file=sys.stderr)
            return 1
        (options.out / source.with_suffix(".ptx").name).write_text(text)
    return 0


def load():
    """NVRTC, from its package."""
    import nvidia.cuda_nvrtc

    (path,) = (pathlib.Path(folder) / "lib/libnvrtc.so.12" for folder in nvidia.cuda_nvrtc.__path__)
    return ctypes.CDLL(str(path))


def compiled(library, source, options):
    """The PTX, or none, and the compiler's log."""
    headers = sorted(source.parent.glob("*.cuh"))
    texts = (ctypes.c_char_p * len(headers))(*(header.read_bytes() for header in headers))
    names = (ctypes.c_char_p * len(headers))(*(header.name.encode() for header in headers))
    program = ctypes.c_void_p()
    made = library.nvrtcCreateProgram(
        ctypes.byref(program), source.read_bytes(), source.name.encode(), len(headers), texts, names
    )
    if made != 0:
        raise RuntimeError(f"nvrtcCreateProgram failed with {made}")
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = library.nvrtcCompileProgram(program, len(options), arguments)
    log = text_of(library, "ProgramLog", program)
    text = None if failed else text_of(library, "PTX", program)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return text, log


def text_of(library, what, program):
    """One of a program's texts."""
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value + 1)
    getattr(library, f"nvrtcGet{what}")(program, text)
    return text.value.decode()


if __name__ == "__main__":
    sys.exit(main())
