"""What a report says of machine and program, and that it says no secrets."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import weightstream
from weightstream import startup
from weightstream.startup.environment import checkpoint_facts, file_system


def test_versions_and_machine_are_recorded_without_being_asked() -> None:
    with startup.collect_startup_timings() as timings:
        pass
    facts = timings.to_dict()["environment"]
    assert facts["weightstream"] == weightstream.__version__
    assert facts["torch"] == torch.__version__ and facts["packages"]["torch"]
    assert facts["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert os.uname().release in facts["kernel"] and facts["cores"] >= 1
    assert {"nvidia_driver", "script_revision", "processor", "memory_bytes", "cuda_initialized"} <= set(facts)
    with startup.collect_startup_timings(environment=False) as timings:
        pass
    assert timings.to_dict()["environment"] == {}


def test_the_gpu_is_named_once_cuda_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name = "a GPU"
        total_memory = 7

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3, 7))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 4)
    with startup.collect_startup_timings() as timings, startup.phase("load"):
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5)
    report = timings.to_dict()
    assert report["environment"]["gpus"] == [{"name": "a GPU", "memory_bytes": 7}]
    levels = report["phases"][0]["levels"]
    assert levels["device.allocated"] == [2, 5] and levels["device.free"] == [3, 3]


def test_no_secret_gets_into_a_report(tmp_path: Path) -> None:
    secret = "s3cr3t-t0k3n-of-nobody"
    script = """
        import sys
        from weightstream import startup

        with startup.collect_startup_timings(path=sys.argv[1]) as timings:
            with startup.phase("load"):
                pass
        timings.save(sys.argv[2])
    """
    paths = [tmp_path / "a.jsonl", tmp_path / "a.json"]
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, paths), secret]
    environment = {**os.environ, "HF_TOKEN": secret, "AWS_SECRET_ACCESS_KEY": secret}
    subprocess.run(command, check=True, timeout=120, env=environment)
    for path in paths:
        text = path.read_text()
        assert secret not in text and "HF_TOKEN" not in text and "AWS_" not in text


def test_the_commit_of_the_script_is_read_from_gits_files(tmp_path: Path) -> None:
    git = tmp_path / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (tmp_path / "inside").mkdir()
    script = tmp_path / "inside" / "start.py"
    script.write_text(
        "import sys\nfrom weightstream import startup\n"
        "with startup.collect_startup_timings() as timings:\n    pass\n"
        "print(timings.to_dict()['environment']['script_revision'])\n"
    )

    def told() -> str:
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
        return done.stdout.strip()

    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert told() == "None"
    (git / "packed-refs").write_text("# pack-refs\nbbbb refs/heads/other\naaaa refs/heads/main\n")
    assert told() == "aaaa"
    (git / "refs" / "heads" / "main").write_text("cccc\n")
    assert told() == "cccc"
    (git / "HEAD").write_text("dddd\n")
    assert told() == "dddd"


def test_a_checkpoint_is_known_by_its_size_and_its_headers_hash(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    paths = []
    for number, data in enumerate([b"abcd", b"wxyz"]):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + data)
        paths.append(str(path))
    first, second = map(checkpoint_facts, paths)
    assert first["header_sha256"] == second["header_sha256"] and len(first["header_sha256"]) == 64
    assert first["bytes"] == len(header) + 12 and first["file_system"]
    short = tmp_path / "short"
    short.write_bytes(b"abc")
    assert checkpoint_facts(str(short))["bytes"] == 3
    assert "problem" in checkpoint_facts(str(tmp_path / "missing"))


def test_file_systems_are_found_by_the_longest_mount(tmp_path: Path) -> None:
    mounts = "\n".join(
        [
            "1 0 8:1 / / rw - ext4 /dev/sda rw",
            "2 1 0:5 / /data rw,relatime shared:1 - nfs4 server:/x rw",
            "3 1 0:6 / /data/my\\040models rw - xfs /dev/sdb rw",
            "4 1 0:7 / /data/my\\040models rw - tmpfs tmpfs rw",
            "a line of something else",
        ]
    )
    assert file_system("/etc/hosts", mounts) == "ext4"
    assert file_system("/data/a", mounts) == "nfs4"
    assert file_system("/database", mounts) == "ext4"
    assert file_system("/data/my models/a", mounts) == "tmpfs"
    assert file_system("/data", "") is None
    assert file_system(str(tmp_path))
