"""Lets the tests import the tools as they import each other: by their folders."""

import pathlib
import sys

TOOLS = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOOLS / name) for name in ("bench", "demo", "gpu")]
