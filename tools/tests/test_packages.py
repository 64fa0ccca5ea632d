"""The pinned packages: all are there in the pinned versions, and one that is missing fails the tests that need it."""

import importlib
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def pinned():
    """The requirements of the base file that apply to this interpreter."""
    lines = (ROOT / "tools" / "requirements-base.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return [requirement for requirement in found if requirement.marker is None or requirement.marker.evaluate()]


@pytest.mark.parametrize("requirement", pinned(), ids=lambda requirement: requirement.name)
def test_a_pinned_package_is_there_in_its_version(requirement):
    assert requirement.specifier.contains(importlib.metadata.version(requirement.name))
    importlib.import_module(requirement.name)


def test_names_that_tests_import_or_skip_are_pinned():
    names = {requirement.name for requirement in pinned()}
    for file in (ROOT / "python" / "tests").glob("test_*.py"):
        for piece in file.read_text().split('importorskip("')[1:]:
            assert piece.split('"')[0].split(".")[0] in names, file.name


# Exit statuses of pytest: 0 all passed, 1 a test failed, 2 a file could not be read, 5 no test was left to run.
@pytest.mark.parametrize(
    ("required", "inside", "code"), [("1", True, 1), ("1", False, 2), ("", True, 0), ("", False, 5)]
)
def test_a_missing_package_skips_only_where_it_may(tmp_path, required, inside, code):
    shutil.copy(ROOT / "python" / "tests" / "conftest.py", tmp_path)
    skip = "pytest.importorskip('no_such_package')"
    lines = ["import pytest", "" if inside else skip, "def test_a():", f"    {skip if inside else 'pass'}"]
    (tmp_path / "test_it.py").write_text("\n".join([*lines, "def test_b():", "    pass"]))
    environment = os.environ | {"WEIGHTSTREAM_REQUIRE_PACKAGES": required, "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout
    assert ("no_such_package" if required else "1 skipped") in done.stdout
