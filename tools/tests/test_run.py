"""The GPU gate's `run.py`, with a made-up bundle and a made-up device."""

import contextlib
import json
import pathlib

import pytest
import run


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    """A bundle with one test program that passes two tests; Python's tests are not run."""
    for folder in ("bin", "wheel", "wheels"):
        (tmp_path / folder).mkdir()
    program = tmp_path / "bin" / "gpu-driver-cuda"
    program.write_text(
        '#!/bin/sh\necho "test result: ok. 2 passed; 0 failed; 0 ignored; finished in 0.1s"\nexit $CODE\n'
    )
    manifest = {"commit": "abc", "binaries": [{"name": program.name, "tests": ["a", "b"]}], "python_tests": 3}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "probe", lambda: ("a GPU", None))
    monkeypatch.setenv("CODE", "0")
    return tmp_path


def python_part(monkeypatch, passed, failed):
    monkeypatch.setattr(run, "run_pytest", lambda environment, listed, only: run.part("pytest", listed, passed, failed))
    monkeypatch.setattr(run, "packages", lambda: contextlib.nullcontext({}))


def last_json(capfd):
    return json.loads(capfd.readouterr().out.strip().splitlines()[-1])


def test_all_that_is_listed_passed(bundle, monkeypatch, capfd):
    python_part(monkeypatch, 3, 0)
    assert run.gate(["--json"]) == 0
    assert last_json(capfd) | {"parts": 0} == {
        "result": "green",
        "device": "a GPU",
        "commit": "abc",
        "passed": 5,
        "failed": 0,
        "missing": 0,
        "parts": 0,
    }


@pytest.mark.parametrize(("passed", "failed"), [(2, 0), (2, 1), (0, 0)])
def test_fewer_than_listed_or_a_failure_is_red(bundle, monkeypatch, capfd, passed, failed):
    python_part(monkeypatch, passed, failed)
    assert run.gate(["--json"]) == 1
    assert last_json(capfd)["result"] == "red"


def test_a_part_of_the_tests_is_never_green(bundle, monkeypatch):
    python_part(monkeypatch, 3, 0)
    assert run.gate(["-k", "a"]) == 1


def test_a_program_that_says_too_little_is_missing_tests(bundle, monkeypatch, capfd):
    python_part(monkeypatch, 3, 0)
    (bundle / "bin" / "gpu-driver-cuda").write_text("#!/bin/sh\necho crashed\nexit 101\n")
    assert run.gate(["--json"]) == 1
    assert last_json(capfd)["missing"] == 2


@pytest.mark.parametrize("ending", ["exit 1", "kill -SEGV $$", "exec sleep 30"])
def test_a_program_that_ends_badly_after_its_tests_is_red(bundle, monkeypatch, capfd, ending):
    python_part(monkeypatch, 3, 0)
    monkeypatch.setattr(run, "LIMIT", 2)
    program = bundle / "bin" / "gpu-driver-cuda"
    program.write_text(program.read_text().replace("exit $CODE", ending))
    assert run.gate(["--json"]) == 1
    outcome = last_json(capfd)
    assert (outcome["result"], outcome["passed"], outcome["failed"], outcome["missing"]) == ("red", 5, 1, 0)


@pytest.mark.parametrize(("code", "red"), [(0, 0), (3, 1)])
def test_a_pytest_that_ends_badly_after_its_tests_is_red(bundle, monkeypatch, code, red):
    def shown(command, environment):
        if report := [word for word in command if word.startswith("--junitxml=")]:
            pathlib.Path(report[0].split("=")[1]).write_text('<testsuites><testsuite tests="3"/></testsuites>')
            return "", code
        return "test result: ok. 2 passed; 0 failed;", 0

    monkeypatch.setattr(run, "packages", lambda: contextlib.nullcontext({}))
    monkeypatch.setattr(run, "shown", shown)
    assert run.gate([]) == red


def test_a_test_that_found_no_device_did_not_run(bundle, monkeypatch, capfd):
    python_part(monkeypatch, 3, 0)
    program = bundle / "bin" / "gpu-driver-cuda"
    program.write_text(program.read_text().replace("echo", 'echo "test a ... skipped a: no device"\necho', 1))
    assert run.gate(["--json"]) == 1
    assert last_json(capfd)["missing"] == 1


def test_no_gpu_is_neither_green_nor_red(bundle, monkeypatch, capfd):
    monkeypatch.setattr(run, "probe", lambda: (None, "PyTorch sees no GPU"))
    assert run.gate(["--json"]) == 3
    assert last_json(capfd)["why"] == "PyTorch sees no GPU"


def test_skipped_tests_did_not_run(tmp_path):
    report = tmp_path / "report.xml"
    assert run.read_report(report) == (0, 0, 0)
    report.write_text('<testsuites><testsuite tests="7" failures="1" errors="1" skipped="2"/></testsuites>')
    assert run.read_report(report) == (3, 2, 0)


def test_tests_for_two_gpus_are_left_out_on_one_and_no_others(tmp_path):
    report = tmp_path / "report.xml"
    skips = "".join(f'<testcase><skipped message="{why}"/></testcase>' for why in ("needs two GPUs", "no gguf"))
    report.write_text(f'<testsuites><testsuite tests="5" skipped="2">{skips}</testsuite></testsuites>')
    assert run.read_report(report) == (3, 0, 1)


def test_packages_in_parts_are_put_together(bundle, tmp_path):
    for index in (10, 0, 1, 2):
        (bundle / "wheels" / f"big-1-py3-none-any.whl.part{index}").write_text(f"{index},")
    out = tmp_path / "out"
    out.mkdir()
    (whole,) = run.joined(out)
    assert whole.name == "big-1-py3-none-any.whl" and whole.read_text() == "0,1,2,10,"


def test_an_example_runs_with_the_packages_and_only_those_that_are_there(bundle, monkeypatch, capfd):
    monkeypatch.setattr(run, "packages", lambda: contextlib.nullcontext({}))
    (bundle / "tools").mkdir()
    (bundle / "examples" / "benchmark").mkdir(parents=True)
    (bundle / "examples" / "benchmark" / "start.py").write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
    assert run.example(["benchmark/start.py", "--tiny"]) == 7
    assert "['--tiny']" in capfd.readouterr().out
    assert run.example(["../run.py"]) == 1 and "benchmark/start.py" in capfd.readouterr().err
    assert run.example([]) == 1
