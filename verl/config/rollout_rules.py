"""The rules of the rollout engine's own keys, in training and in generation: which engine has what, what it needs."""

from __future__ import annotations

import importlib.util

from verl.config import names
from verl.config.problems import Report
from verl.config.rollout import GeneratorConfig

_FOREIGN = tuple(name for name, row in names.ROLLOUTS.items() if row.foreign)
# Keys that not every engine has: their value where nothing is asked for, who has them, and what else serves.
_OF_SOME = {
    "expert_parallel_size": (1, ("vllm", "sglang"), "Leave it out: experts are cut as other layers are"),
    "quantization": (None, ("vllm", "sglang"), "Leave it out, or set {path}.name=vllm"),
}
# Engines that never share a worker's process, and why.
_ALONE = {"sglang": "SGLang ends every process that the one it runs in has started"}


def engine_rules(path: str, rollout: GeneratorConfig, report: Report) -> None:
    """Report what the engine of the block at `path` cannot do, and name what it does not read."""
    name, size = rollout.name, rollout.tensor_model_parallel_size
    foreign = names.ROLLOUTS[name].foreign
    by_name = (f"{path}.name",)
    for key, (neutral, engines, fix) in _OF_SOME.items():
        if rollout[key] != neutral and name not in engines:
            why = f"{path}.name = {name} does not do it, {' and '.join(engines)} do"
            report.problem(f"{path}.{key}", rollout[key], why, fix.format(path=path), by_name)
    if foreign and rollout.expert_parallel_size not in (1, size):
        why = f"experts are spread over the ranks of one copy, {path}.tensor_model_parallel_size = {size}"
        fix = f"Set it to {' or '.join(dict.fromkeys(('1', str(size))))}"
        report.problem(f"{path}.expert_parallel_size", rollout.expert_parallel_size, why, fix)
    if rollout.server_urls:
        _server_rules(path, rollout, report)
    if foreign and rollout.in_process and (size > 1 or name in _ALONE):
        why = f"one process has one device, and {path}.tensor_model_parallel_size = {size}"
        why = _ALONE.get(name, why)
        report.problem(f"{path}.in_process", True, why, "Leave it out: the engine then has processes of its own")


def _server_rules(path: str, rollout: GeneratorConfig, report: Report) -> None:
    urls = rollout.server_urls
    if not names.ROLLOUTS[rollout.name].foreign:
        why = f"{path}.name = {rollout.name} is an engine of this process"
        fix = f"Say what runs there: {path}.name={'|'.join(_FOREIGN)}"
        report.problem(f"{path}.server_urls", urls, why, fix, (f"{path}.name",))
    for url in urls:
        if not url.startswith(("http://", "https://")):
            fix = f"Write it as http://{url.removeprefix('//')}"
            report.problem(f"{path}.server_urls", url, "is no URL of a server", fix)
    if rollout.in_process:
        why = f"{path}.server_urls names engines that run elsewhere"
        report.problem(f"{path}.in_process", True, why, "Leave one of the two out")


def is_installed(package: str) -> bool:
    """Whether a package (of ours, "") can be imported; a part of one too."""
    names = package.split(".") if package else ()
    return all(importlib.util.find_spec(".".join(names[: count + 1])) for count in range(len(names)))


def check_engine(path: str, rollout: GeneratorConfig, report: Report) -> None:
    """Report an engine whose package is not installed here; one that is reached by URL needs none."""
    row = names.ROLLOUTS[rollout.name]
    if not rollout.server_urls and not is_installed(row.package):
        why, fix = f"{row.package} is not installed here", f"Run {row.install}; or set {path}.name=native"
        report.broken(f"{path}.name", rollout.name, why, f"{fix}, which needs no install")
