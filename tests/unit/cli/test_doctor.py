"""`verl doctor`: a report of this machine, as text and JSON; what would fail has exit code 1 and a remedy."""

from __future__ import annotations

import json
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


def test_a_cluster_that_does_not_respond_fails(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    (check,) = doctor.check_cluster()
    assert check.status == "failed"
    assert "127.0.0.1:1" in check.value
