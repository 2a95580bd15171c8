"""`verl doctor`: a report of this machine, as text and JSON; what would fail has exit code 1 and a remedy."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from verl.cli import doctor

SECTIONS = {"versions", "devices", "limits", "ports", "disk", "sandbox", "features"}


def test_the_command_reports_this_machine_as_json():
    done = subprocess.run(
        [sys.executable, "-m", "verl", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    report = json.loads(done.stdout)
    assert {check["section"] for check in report["checks"]} >= SECTIONS
    failed = [check for check in report["checks"] if check["status"] == "failed"]
    assert done.returncode == int(bool(failed)) == int(not report["ok"]), failed
    assert "torch computes" in {check["name"] for check in report["checks"]}


@pytest.fixture
def _quick(monkeypatch):
    """torch is not tried in another process."""
    found = {"version": "2.13", "cuda": None, "names": [], "memory": []}
    monkeypatch.setattr(doctor, "try_torch", lambda: (found, ""))


@pytest.mark.usefixtures("_quick")
def test_a_broken_torch_fails(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "try_torch", lambda: (None, "ImportError: libcudart"))
    assert doctor.main([]) == 1
    printed = capsys.readouterr().out
    assert "libcudart" in printed
    assert "A run would fail: torch" in printed


@pytest.mark.usefixtures("_quick")
def test_a_gpu_that_torch_cannot_use_fails(monkeypatch):
    monkeypatch.setattr("verl.config.devices.has_no_gpu", lambda: False)
    gpu = next(check for check in doctor.check_devices() if check.name == "GPU")
    assert gpu.status == "failed"
    assert "trainer.device=cpu" in gpu.remedy


def test_a_missing_or_old_package_fails_with_the_command(monkeypatch):
    from packaging.requirements import Requirement

    wanted = [Requirement("no-such-package>=1"), Requirement("packaging>=999")]
    monkeypatch.setattr(doctor, "package_requirements", lambda extra=None: wanted)
    failed = [check for check in doctor.check_versions() if check.status == "failed"]
    assert [check.name for check in failed] == ["no-such-package", "packaging"]
    assert failed[0].remedy == 'pip install "no-such-package>=1"'
    assert ">=999" in failed[1].value


def test_missing_extras_name_feature_and_command(monkeypatch):
    from packaging.requirements import Requirement

    monkeypatch.setattr(doctor, "package_requirements", lambda extra=None: [Requirement("no-such-package>=1")])
    lora = next(check for check in doctor.check_features() if check.name == "lora")
    assert lora.status == "info"
    assert "lora_rank" in lora.value
    assert lora.remedy == 'pip install -e ".[lora]"'


def test_outside_of_a_checkout_the_command_installs_the_requirements_of_the_extra(monkeypatch):
    monkeypatch.setattr(doctor, "IN_CHECKOUT", False)
    commands = {extra: doctor.install_command(extra) for extra in ("dashboard", "vllm")}
    assert commands["dashboard"] == 'pip install "ray[default]>=2.50"'
    assert "separate environment" in commands["vllm"]


def test_a_full_disk_fails(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    assert all(check.status == "failed" and check.remedy for check in doctor.check_disk())


@pytest.mark.parametrize(
    ("files", "processes", "statuses", "values"),
    [
        ((64, 4096), (64, 64), ["ok", "failed"], ["64, at most 4096", "64, at most 64"]),
        ((64, 4095), (4095, 9999), ["warning", "warning"], ["64, at most 4095", "4095, at most 9999"]),
        ((64, 255), (256, 256), ["failed", "warning"], ["64, at most 255", "256, at most 256"]),
        ((64, -1), (-1, -1), ["ok", "ok"], ["64, at most unlimited", "unlimited, at most unlimited"]),
    ],
)
def test_limits_count_where_a_run_meets_them(monkeypatch, files, processes, statuses, values):
    """Of open files the hard limit, to which Ray raises the other; of processes the soft limit."""
    limits = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_NPROC: processes}
    monkeypatch.setattr(doctor.resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(doctor.resource, "RLIM_INFINITY", -1)
    *_, open_files, threads = doctor.check_limits()
    assert ([open_files.name, threads.name], [open_files.status, threads.status]) == (
        ["open files", "processes"],
        statuses,
    )
    assert [open_files.value, threads.value] == values
    for check, command in ((open_files, "ulimit -n"), (threads, "ulimit -u")):
        assert (command in check.remedy) == (check.status != "ok")


@pytest.mark.parametrize(("free", "status"), [(1e9, "warning"), (2e9, "ok")])
def test_little_shared_memory_is_a_warning(monkeypatch, free, status):
    monkeypatch.setattr(doctor.Path, "is_dir", lambda path: True)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free}))
    shared, *_ = doctor.check_limits()
    assert (shared.name, shared.value, shared.status) == ("/dev/shm", f"{free / 1e9:.1f} GB free", status)
    assert ("--shm-size" in shared.remedy) == (status != "ok")


def test_a_cluster_that_does_not_respond_fails(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    (check,) = doctor.check_cluster()
    assert check.status == "failed"
    assert "127.0.0.1:1" in check.value
