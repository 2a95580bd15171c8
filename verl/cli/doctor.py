"""`verl doctor`: check this machine and the installed packages, and name what is missing for which feature.

Exit code 1 if a run would fail. torch is tried in a separate process, because a broken driver may crash or block it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl.config.block_rules import is_installed
from verl.config.problems import IN_CHECKOUT, requirements_of
from verl.version import __version__

Status = Literal["ok", "info", "warning", "failed"]

_GB = 1e9
_MIN_DISK, _LOW_DISK = 1 * _GB, 20 * _GB
_MIN_MEMORY, _LOW_MEMORY = 2 * _GB, 8 * _GB
_LOW_SHARED_MEMORY = 2 * _GB
_MIN_LIMIT, _LOW_LIMIT = 256, 4096
_TORCH_SECONDS = 180
_SHOWN_PACKAGES = ("torch", "ray", "transformers", "tensordict", "hydra-core", "datasets")
_PORTS = {6379: "Ray (several nodes)", 8265: "Ray dashboard", 29500: "trainer.master_port", 8001: "verl serve"}
# Extras of pyproject.toml, and what they are needed for.
_FEATURES = {
    "lora": "LoRA adapters (model.lora_rank)",
    "vllm": "rollout.name=vllm",
    "sglang": "rollout.name=sglang",
    "megatron": "strategy=megatron",
    "gpu": "Triton kernels of the embedded engine, GPU memory readings",
    "wandb": "trainer.logger=wandb",
    "tensorboard": "trainer.logger=tensorboard",
    "dashboard": "Ray's dashboard",
    "search": "search agents: BM25 and dense retrieval (verl.search)",
    "mcp": "tools of MCP servers",
}
# Modules that show whether an extra is installed, where its requirements do not.
_MODULES = {"dashboard": "aiohttp_cors", "megatron": "megatron.core"}
# Engines that pin torch, so each needs a separate environment.
_PIN_TORCH = ("vllm", "sglang")
_TRY_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
names = [torch.cuda.get_device_name(i) for i in range(count)]
memory = [torch.cuda.get_device_properties(i).total_memory for i in range(count)]
for device in [f"cuda:{i}" for i in range(count)] or ["cpu"]:
    ones = torch.ones(8, 8, device=device)
    float((ones @ ones).sum())
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "names": names, "memory": memory}))
"""


@dataclass(frozen=True)
class Check:
    """The result of one check. `failed`: a run would fail; `warning`: some runs would fail or be slow."""

    section: str
    name: str
    value: str
    status: Status = "ok"
    remedy: str = ""


def main(arguments: Sequence[str]) -> int:
    """Print the report; return 1 if a run would fail."""
    parser = argparse.ArgumentParser(prog="verl doctor", description="Check this machine and the installed packages.")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    checks = run_checks()
    failed = any(check.status == "failed" for check in checks)
    if options.json:
        report = {"verl": __version__, "ok": not failed, "checks": [dataclasses.asdict(check) for check in checks]}
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    else:
        _show(checks)
    return int(failed)


def run_checks() -> list[Check]:
    """Return the results of all checks, by section."""
    parts: tuple[Callable[[], Iterator[Check]], ...] = (
        check_versions,
        check_devices,
        check_limits,
        check_ports,
        check_disk,
        check_cluster,
        check_sandbox,
        check_features,
    )
    return [check for part in parts for check in part()]


def check_versions() -> Iterator[Check]:
    """Python, and every required package with the bounds of the installation."""
    section = "versions"
    supported = sys.version_info >= (3, 10)
    yield Check(section, "python", platform.python_version(), *_verdict(supported, "Install Python 3.10 or newer."))
    yield Check(section, "platform", f"{platform.system()} {platform.release()} {platform.machine()}", "info")
    yield Check(section, "verl", f"{__version__} ({Path(__file__).parents[1]})", "info")
    requirements = package_requirements()
    if not requirements:
        yield Check(
            section, "requirements", "unknown: verl is not installed as a package", "warning", "pip install -e ."
        )
    problems = 0
    for requirement in requirements:
        problem = _requirement_problem(requirement)
        problems += problem is not None
        if problem is not None:
            yield Check(section, requirement.name, problem, "failed", f'pip install "{requirement}"')
        elif requirement.name in _SHOWN_PACKAGES:
            yield Check(section, requirement.name, importlib.metadata.version(requirement.name))
    if requirements and not problems:
        yield Check(section, "required packages", f"{len(requirements)} of {len(requirements)}")


def package_requirements(extra: str | None = None) -> list[Any]:
    """Return the requirements of the package verl, or those that `extra` adds."""
    try:
        from packaging.requirements import Requirement

        declared = importlib.metadata.requires("verl") or []
    except ImportError:  # includes PackageNotFoundError
        return []
    parsed = [Requirement(text) for text in declared]
    if extra is None:
        return [item for item in parsed if item.marker is None or item.marker.evaluate({"extra": ""})]
    return [item for item in parsed if item.marker is not None and item.marker.evaluate({"extra": extra})]


def _requirement_problem(requirement: Any) -> str | None:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{version} is installed, {requirement.specifier} is needed"
    return None


def check_devices() -> Iterator[Check]:
    """CPU cores, host memory, GPUs with their driver, and whether torch can compute on them."""
    from verl.config.devices import has_no_gpu, host_memory_available, host_memory_total
    from verl.utils.resources import usable_cores

    section = "devices"
    yield Check(section, "CPU cores", f"{usable_cores():g}", "info")
    available = host_memory_available()
    status = _level(available, _MIN_MEMORY, _LOW_MEMORY)
    value = f"{available / _GB:.1f} of {host_memory_total() / _GB:.1f} GB available"
    yield Check(
        section, "host memory", value, status, "" if status == "ok" else "Processes of a run take 1 to 4 GB each."
    )
    driver = Path("/proc/driver/nvidia/version")
    if driver.is_file():
        yield Check(section, "driver", driver.read_text().splitlines()[0].removeprefix("NVRM version: "), "info")
    torch, error = try_torch()
    if torch is None:
        remedy = "Install a torch build for this machine: docs/start/installation.md."
        yield Check(section, "torch", error, "failed", remedy)
        return
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else "without CUDA"
    yield Check(section, "torch computes", f"{torch['version']}, {build}")
    for number, (name, memory) in enumerate(zip(torch["names"], torch["memory"], strict=True)):
        yield Check(section, f"GPU {number}", f"{name}, {memory / _GB:.0f} GB")
    if not torch["names"] and has_no_gpu():
        yield Check(section, "GPU", "none: runs use the CPU", "info")
    elif not torch["names"]:
        remedy = "Install a CUDA build of torch that the driver supports (nvidia-smi), or set trainer.device=cpu."
        yield Check(section, "GPU", "present, but torch cannot use it", "failed", remedy)


def try_torch() -> tuple[dict[str, Any] | None, str]:
    """Return versions and devices as torch reports them after a small computation, or None and the error."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRY_TORCH], capture_output=True, text=True, timeout=_TORCH_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"does not respond within {_TORCH_SECONDS} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return None, lines[-1] if lines else f"ended with exit code {done.returncode}"
    return json.loads(done.stdout.strip().splitlines()[-1]), ""


def check_limits() -> Iterator[Check]:
    """Shared memory and the limits of this user."""
    section = "limits"
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).free
        low = size < _LOW_SHARED_MEMORY
        remedy = "Ray's object store uses it: give a container --shm-size=8g (or --ipc=host)." if low else ""
        yield Check(section, "/dev/shm", f"{size / _GB:.1f} GB free", "warning" if low else "ok", remedy)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Ray raises the soft limit to the hard one.
    status = _level(_limit(hard), _MIN_LIMIT, _LOW_LIMIT)
    remedy = "" if status == "ok" else "ulimit -n 65536 (as root: /etc/security/limits.conf, or --ulimit nofile=65536)"
    yield Check(section, "open files", f"{_show_limit(soft)}, at most {_show_limit(hard)}", status, remedy)
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    status = _level(_limit(soft), _MIN_LIMIT, _LOW_LIMIT)
    remedy = "" if status == "ok" else "ulimit -u 32768: threads count, too"
    yield Check(section, "processes", f"{_show_limit(soft)}, at most {_show_limit(hard)}", status, remedy)


def check_ports() -> Iterator[Check]:
    """The loopback interface, and the default ports of servers."""
    from verl.utils.network import port_in_use

    section = "ports"
    try:
        with socket.create_server(("127.0.0.1", 0)):
            yield Check(section, "loopback", "a port can be opened")
    except OSError as error:
        yield Check(section, "loopback", str(error), "failed", "Allow connections to 127.0.0.1: Ray needs them.")
    for port, user in _PORTS.items():
        if port_in_use(port):
            yield Check(section, str(port), f"in use; default of {user}", "info")
        else:
            yield Check(section, str(port), f"free; default of {user}")


def check_disk() -> Iterator[Check]:
    """Free space and permissions of the folders that a run writes to."""
    section = "disk"
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    folders = {
        "checkpoints": (Path.cwd(), "Run in a folder with more space, or set trainer.default_local_dir."),
        "Ray": (
            Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())),
            "Set RAY_TMPDIR to a short path with space.",
        ),
        "models": (home, "Set HF_HOME to a folder with more space."),
        "prepared data": (Path(os.environ.get("VERL_CACHE", "~/.cache/verl")).expanduser(), "Set VERL_CACHE."),
    }
    for name, (folder, remedy) in folders.items():
        present = next(path for path in (folder, *folder.parents) if os.path.exists(path))
        free = shutil.disk_usage(present).free
        writable = os.access(present, os.W_OK)
        status = _level(free, _MIN_DISK, _LOW_DISK) if writable else "failed"
        value = f"{folder}: {free / _GB:.0f} GB free" + ("" if writable else ", not writable")
        yield Check(section, name, value, status, "" if status == "ok" else remedy)


def check_cluster() -> Iterator[Check]:
    """The Ray cluster that a run on this machine would join."""
    from verl.trainer.common.ray_cluster import find_cluster_problem, joins_cluster

    if joins_cluster():
        problem = find_cluster_problem()
        value = problem or "running: a run on this machine joins it (RAY_ADDRESS=local starts a new one)"
        yield Check("Ray", "cluster", value, "failed" if problem else "info")


def check_sandbox() -> Iterator[Check]:
    """How well this machine isolates programs that a model writes."""
    from verl.sandbox.sandbox import available

    isolation = available()
    status: Status = "ok" if isolation.level == "full" else "warning"
    remedy = "" if status == "ok" else f"Missing: {', '.join(isolation.missing)} (docs/reference/sandbox.md)."
    yield Check("sandbox", "isolation", str(isolation), status, remedy)


def check_features() -> Iterator[Check]:
    """Engines and extras: what is installed, and the command that installs the others."""
    section = "features"
    yield Check(section, "native, hf, fsdp", "built-in rollout and training engines")
    for extra, feature in _FEATURES.items():
        requirements = package_requirements(extra)
        problems = [problem for item in requirements if (problem := _requirement_problem(item)) is not None]
        if problems or not is_installed(_MODULES.get(extra, "verl")):
            state = problems[0] if problems else "not installed"
            yield Check(section, extra, f"{state}; for {feature}", "info", install_command(extra))
        else:
            yield Check(section, extra, f"installed; for {feature}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra: in a checkout by its name, elsewhere by its requirements."""
    if not IN_CHECKOUT:
        command = f"pip install {' '.join(requirements_of(extra))}"
        return (
            f"{command} (in a separate environment: it pins the version of torch)" if extra in _PIN_TORCH else command
        )
    command = f'pip install -e ".[{extra}]"'
    return f"make setup-{extra}, or {command}" if extra in (*_PIN_TORCH, "megatron") else command


def _verdict(passed: bool, remedy: str) -> tuple[Status, str]:
    return ("ok", "") if passed else ("failed", remedy)


def _level(value: float, least: float, comfortable: float) -> Status:
    return "failed" if value < least else "warning" if value < comfortable else "ok"


def _limit(value: int) -> float:
    return float("inf") if value == resource.RLIM_INFINITY else value


def _show_limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _show(checks: Sequence[Check]) -> None:
    """Print the report, with the verdict last."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    colors = {"ok": "green", "info": "cyan", "warning": "yellow", "failed": "red"}
    marks = {"ok": "ok", "info": "-", "warning": "warn", "failed": "FAIL"}
    section = ""
    for check in checks:
        if check.section != section:
            section = check.section
            console.print(f"[bold]{escape(section)}[/]")
        mark = f"[{colors[check.status]}]{marks[check.status]:<4}[/]"
        remedy = f"\n       → {escape(check.remedy)}" if check.remedy else ""
        console.print(f"  {mark} {check.name:<18} {escape(check.value)}{remedy}")
    failed = [check.name for check in checks if check.status == "failed"]
    if failed:
        console.print(f"\n[red]A run would fail:[/] {escape(', '.join(failed))}")
    else:
        console.print("\n[green]Runs can start on this machine.[/]")
