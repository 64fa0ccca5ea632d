"""Runs the GPU tests, the bench or the demo from this folder, on a machine with Python and PyTorch and nothing else.

    python3 run.py                    the gate: exit status 0 all passed, 1 some failed or did not run, 3 no usable GPU
    python3 run.py bench stream …     measures; arguments go to tools/bench/stream.py and its like
    python3 run.py demo …             the demo; arguments go to tools/demo/demo.py
    python3 run.py example NAME …     a script of examples/, such as benchmark/vae_startup.py; most need diffusers in wheels/

The packages of wheel/ and wheels/ are installed into a folder that is removed at the end. A package too large to be
carried whole may lie in wheels/ as NAME.whl.part0, NAME.whl.part1, … Standard library only.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

HERE = pathlib.Path(__file__).resolve().parent
GREEN, RED, NO_GPU = 0, 1, 3
# Seconds for one test program, or for all Python tests: a hang must be a failure and not the end of the machine's time.
LIMIT = 420
# Why a test is skipped that no machine with one GPU can run: the only skip that is not a failure.
TWO_GPUS = "needs two GPUs"
PROBE = """
import sys
try:
    import torch
except ImportError as error:
    sys.exit(f"PyTorch cannot be imported: {error}")
if not torch.cuda.is_available():
    sys.exit(f"PyTorch {torch.__version__} sees no GPU")
torch.zeros(1, device="cuda").sum().item()
print(torch.cuda.get_device_name(0), "with PyTorch", torch.__version__)
"""


def main():
    """Dispatches; a first word that is no command means the gate."""
    command, rest = (sys.argv[1], sys.argv[2:]) if sys.argv[1:2] and sys.argv[1] in COMMANDS else ("gate", sys.argv[1:])
    return COMMANDS[command](rest)


def gate(arguments):
    """Runs every test that the manifest lists."""
    parser = argparse.ArgumentParser(prog="run.py")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("-k", dest="only", default="", help="run only tests whose name contains this; never green")
    options = parser.parse_args(arguments)
    manifest = json.loads((HERE / "manifest.json").read_text())
    device, why = probe()
    if device is None:
        return close(
            options,
            NO_GPU,
            {"result": "no usable GPU", "why": why, "commit": manifest["commit"]},
            f"no usable GPU: {why}",
        )
    print(device, flush=True)
    parts = [run_binary(binary, options.only) for binary in manifest["binaries"]]
    with packages() as environment:
        parts.append(run_pytest(environment, manifest["python_tests"], options.only))
    passed, failed, missing = (sum(part[key] for part in parts) for key in ("passed", "failed", "missing"))
    green = failed == 0 and missing == 0 and passed > 0 and not options.only
    summary = {
        "result": "green" if green else "red",
        "device": device,
        "commit": manifest["commit"],
        "passed": passed,
        "failed": failed,
        "missing": missing,
        "parts": parts,
    }
    lines = [
        f"{part['name']:32} {part['passed']:4} passed {part['failed']:3} failed {part['missing']:3} not run of "
        f"{part['listed']}"
        for part in parts
    ]
    lines += [f"gpu-gate: {summary['result']}", f"{passed} passed, {failed + missing} failed"]
    return close(options, GREEN if green else RED, summary, "\n".join(lines))


def close(options, code, summary, text):
    """Prints the outcome, the machine-readable form last."""
    print(text, flush=True)
    if options.json:
        print(json.dumps(summary), flush=True)
    return code


def probe():
    """The GPU's name, or why there is none that can be used."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout.strip(), None
    return None, (done.stderr.strip().splitlines() or ["unknown"])[-1]


def run_binary(binary, only):
    """Runs one test program. Its own closing line says how many tests passed."""
    program = HERE / "bin" / binary["name"]
    program.chmod(0o755)
    environment = os.environ | {"WEIGHTSTREAM_REQUIRE_GPU": "1", "RUST_BACKTRACE": "1"}
    command = [str(program), "--include-ignored", "--test-threads=1", "--nocapture", *([only] if only else [])]
    output, code = shown(command, environment)
    counts = re.findall(r"test result: \S+ (\d+) passed; (\d+) failed;", output)
    passed, failed = (sum(int(pair[index]) for pair in counts) for index in (0, 1))
    # A test that finds no device says so and returns, which its runner counts as passed.
    skipped = len(set(re.findall(r"\bskipped (\w+):", output)))
    return part(binary["name"], len(binary["tests"]), max(0, passed - skipped), failed, code)


def run_pytest(environment, listed, only):
    """Runs the Python tests marked gpu. A test that was skipped did not run."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--color=no", "-p", "no:cacheprovider"]
        command += ["-rs", "--durations=10", f"--junitxml={report}", *(["-k", only] if only else []), "tests"]
        environment = environment | {"WEIGHTSTREAM_REQUIRE_GPU": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        environment["DDO_RUN_LINEAR_CONV_CUDA_GATE"] = "1"
        _, code = shown(command, environment)
        passed, failed, elsewhere = read_report(report)
    if elsewhere:
        print(f"{elsewhere} of pytest's {listed} tests need two GPUs, which this machine does not have", flush=True)
    return part("pytest", listed - elsewhere, passed, failed, code)


def read_report(report):
    """Passed and failed tests of a JUnit file, none if it was not written, and those that need more GPUs than there are."""
    if not report.exists():
        return 0, 0, 0
    passed = failed = elsewhere = 0
    for suite in xml.etree.ElementTree.parse(report).getroot().iter("testsuite"):
        bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        failed += bad
        passed += int(suite.get("tests", 0)) - bad - int(suite.get("skipped", 0))
        elsewhere += sum(skipped.get("message") == TWO_GPUS for skipped in suite.iter("skipped"))
    return passed, failed, elsewhere


def part(name, listed, passed, failed, code=0):
    """One line of the summary. A program that crashed or hung after its last test has failed, whatever they said."""
    missing = max(0, listed - passed - failed)
    if code != 0 and missing == 0:
        failed = max(1, failed)
    return {
        "name": name,
        "listed": listed,
        "passed": passed,
        "failed": failed,
        "exit_status": code,
        "missing": missing,
    }


def shown(command, environment):
    """Runs a program in this folder, showing its output as it comes; gives output and exit status."""
    print("$", " ".join(command), flush=True)
    with tempfile.TemporaryFile("w+b") as kept:
        tee = subprocess.Popen(
            ["tee", f"/proc/self/fd/{kept.fileno()}"], stdin=subprocess.PIPE, pass_fds=[kept.fileno()]
        )
        try:
            code = subprocess.run(
                command, env=environment, cwd=HERE, stdout=tee.stdin, stderr=subprocess.STDOUT, timeout=LIMIT
            ).returncode
        except subprocess.TimeoutExpired:
            print(f"stopped after {LIMIT} s: {command[0]}", flush=True)
            code = -1
        tee.stdin.close()
        tee.wait()
        kept.seek(0)
        return kept.read().decode(errors="replace"), code


@contextlib.contextmanager
def packages():
    """An environment in which the packages carried here can be imported."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="weightstream-"))
    try:
        wheels = [*(HERE / "wheel").glob("*.whl"), *(HERE / "wheels").glob("*.whl"), *joined(folder)]
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--no-cache-dir",
        ]
        # Some peers declare a newer Python than they need.
        command += ["--disable-pip-version-check", "--ignore-requires-python", "--target", str(folder / "site")]
        subprocess.run([*command, *map(str, wheels)], check=True)
        path = os.pathsep.join(filter(None, [str(folder / "site"), os.environ.get("PYTHONPATH")]))
        yield os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def joined(folder):
    """Packages carried in parts, put together."""
    parts = sorted((HERE / "wheels").glob("*.whl.part*"), key=lambda path: (path.stem, int(path.suffix[5:])))
    for path in parts:
        with open(folder / path.stem, "ab") as whole, open(path, "rb") as piece:
            shutil.copyfileobj(piece, whole)
    return sorted({folder / path.stem for path in parts})


def bench(arguments):
    """Runs a bench by name."""
    programs = {
        "stream": [],
        "ready": ["--locker", str(HERE / "bin/lock_slab")],
        "load": ["--reader", str(HERE / "bin/load")],
        "dequant": [],
        "pipeline": [],
        "quantized": [],
        "lora": [],
        "calibrate": [],
    }
    if not arguments or arguments[0] not in programs:
        print(f"run.py bench: the benches here are {', '.join(programs)}", file=sys.stderr)
        return RED
    commit = json.loads((HERE / "manifest.json").read_text())["commit"]
    return tool(f"bench/{arguments[0]}.py", ["--commit", commit, *programs[arguments[0]], *arguments[1:]])


def demo(arguments):
    """Runs the demo."""
    return tool("demo/demo.py", arguments)


def example(arguments):
    """Runs a script of examples/."""
    known = sorted(str(path.relative_to(HERE / "examples")) for path in (HERE / "examples").rglob("*.py"))
    if not arguments or arguments[0] not in known:
        print(f"run.py example: the examples here are {', '.join(known)}", file=sys.stderr)
        return RED
    return tool(f"../examples/{arguments[0]}", arguments[1:])


def tool(path, arguments):
    """Runs a script of tools/ with the packages carried here."""
    device, why = probe()
    if device is None:
        print(f"no usable GPU: {why}", file=sys.stderr)
        return NO_GPU
    with packages() as environment:
        return subprocess.run([sys.executable, str(HERE / "tools" / path), *arguments], env=environment).returncode


COMMANDS = {"gate": gate, "bench": bench, "demo": demo, "example": example}

if __name__ == "__main__":
    sys.exit(main())
