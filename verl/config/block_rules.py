"""Rules of single blocks, shared by all programs: rollout engine, LoRA, optimizer, run, user code."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence

from verl.config import names
from verl.config.engine import CriticModelConfig, ModelConfig, OptimConfig
from verl.config.ppo import CustomClassConfig, SamplerConfig
from verl.config.problems import Report, install_command, show
from verl.config.rollout import GeneratorConfig
from verl.config.schema import Block, entries, get_path, join
from verl.config.trainer import RunConfig

_EXTERNAL_ENGINES = tuple(name for name, row in names.ROLLOUTS.items() if row.third_party)
# Keys that only some engines support: neutral value, engines, remedy.
_PARTLY_SUPPORTED = {
    "expert_parallel_size": (1, ("vllm", "sglang"), "Leave it out: experts are sharded like other layers"),
    "quantization": (None, ("vllm", "sglang"), "Leave it out, or set {path}.name=vllm"),
}
# Engines that cannot run in a worker's process, and why.
_SEPARATE_PROCESS = {"sglang": "SGLang kills all child processes of the process it runs in"}


def engine_rules(path: str, rollout: GeneratorConfig, report: Report) -> None:
    """Report keys of the rollout block at `path` that its engine does not support."""
    name, size = rollout.name, rollout.tensor_model_parallel_size
    external = names.rollout_traits(name).third_party
    by_name = (f"{path}.name",)
    for key, (neutral, engines, fix) in _PARTLY_SUPPORTED.items():
        if rollout[key] != neutral and name not in engines:
            why = f"{path}.name = {name} does not support it, {' and '.join(engines)} do"
            report.problem(f"{path}.{key}", rollout[key], why, fix.format(path=path), by_name)
    if external and rollout.expert_parallel_size not in (1, size):
        why = f"experts are distributed over the ranks of a replica, {path}.tensor_model_parallel_size = {size}"
        fix = f"Set it to {' or '.join(dict.fromkeys(('1', str(size))))}"
        report.problem(f"{path}.expert_parallel_size", rollout.expert_parallel_size, why, fix)
    if rollout.server_urls:
        _server_rules(path, rollout, report)
    if external and rollout.in_process and (size > 1 or name in _SEPARATE_PROCESS):
        why = f"a process has one device, and {path}.tensor_model_parallel_size = {size}"
        why = _SEPARATE_PROCESS.get(name, why)
        report.problem(f"{path}.in_process", True, why, "Leave it out: the engine then runs in separate processes")


def _server_rules(path: str, rollout: GeneratorConfig, report: Report) -> None:
    urls = rollout.server_urls
    if not names.rollout_traits(rollout.name).third_party:
        why = f"{path}.name = {rollout.name} runs in the worker processes"
        fix = f"Set the engine that runs there: {path}.name={'|'.join(_EXTERNAL_ENGINES)}"
        report.problem(f"{path}.server_urls", urls, why, fix, (f"{path}.name",))
    for url in urls:
        if not url.startswith(("http://", "https://")):
            fix = f"Write it as http://{url.removeprefix('//')}"
            report.problem(f"{path}.server_urls", url, "is not a URL of a server", fix)
    if rollout.in_process:
        why = f"{path}.server_urls refers to engines that run elsewhere"
        report.problem(f"{path}.in_process", True, why, "Leave one of the two out")


def is_installed(package: str) -> bool:
    """Whether a package or module can be found; "" is always available. Only its parent packages are imported."""
    try:
        return not package or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # a parent package is missing or broken
        return False


def check_engine(path: str, rollout: GeneratorConfig, report: Report) -> None:
    """Report a rollout engine whose package is not installed; engines at server_urls need none."""
    engine = names.rollout_traits(rollout.name)
    if not rollout.server_urls and not is_installed(engine.package):
        why, fix = (
            f"{engine.package} is not installed",
            f"Run {install_command(engine.install)}; or set {path}.name=native",
        )
        report.invalid(f"{path}.name", rollout.name, why, f"{fix}, which is built in")


ALL_LINEAR = "all-linear"

_PLAIN_NAME = re.compile(r"[\w.-]+")
_LOW_RATE = 1e-5


def module_matcher(names: Sequence[str] | None) -> list[str] | str | None:
    """Convert names for peft: a list of suffixes, or a string (ALL_LINEAR or one regular expression)."""
    if not names:
        return None
    if len(names) == 1 and (names[0] == ALL_LINEAR or not _PLAIN_NAME.fullmatch(names[0])):
        re.compile(names[0])
        return names[0]
    patterns = [name for name in names if name == ALL_LINEAR or not _PLAIN_NAME.fullmatch(name)]
    if patterns:
        raise ValueError(f"{patterns[0]!r} is one of several entries, which must be plain names")
    return list(names)


def lora_rules(path: str, model: ModelConfig | CriticModelConfig, lr: float, report: Report) -> None:
    """Report invalid LoRA keys of the model block at `path`; `lr` is its learning rate."""
    if model.lora_rank == 0:
        return
    rank = (f"{path}.lora_rank",)
    if not model.target_modules:
        why = f"is empty, but {path}.lora_rank = {model.lora_rank} needs layers"
        report.problem(f"{path}.target_modules", [], why, f"Set [{ALL_LINEAR}], or lora_rank=0", rank)
    for key in ("target_modules", "exclude_modules"):
        names = getattr(model, key)
        try:
            module_matcher(names)
        except (ValueError, re.error) as error:
            fix = "Set suffixes of names only, or one regular expression for the whole name"
            report.problem(f"{path}.{key}", names, f"is invalid: {error}", fix, rank)
    if lr < _LOW_RATE:
        report.notice(
            f"{path}.lora_rank = {model.lora_rank} with a learning rate of {lr:g}: adapters usually need ten times the "
            "rate of full training, e.g. 1e-5 to 1e-4."
        )


def check_lora_package(path: str, model: ModelConfig | CriticModelConfig, report: Report) -> None:
    """Report adapters without the package that they need."""
    if model.lora_rank and not is_installed("peft"):
        why = "requires the package peft, which is not installed"
        fix = f"Run `{install_command('pip install -e .[lora]')}`, or set it to 0"
        report.problem(f"{path}.lora_rank", model.lora_rank, why, fix)


def values_present(block: Block, path: str, report: Report) -> None:
    """Report required keys without value, and nulls of keys whose type is not optional."""
    for name, entry in entries(type(block)).items():
        key_path, value = join(path, name), block[name]
        if isinstance(value, Block):
            if entry.key.follows is None:  # else the problem is reported for the followed block
                values_present(value, key_path, report)
        elif entry.key.required is not None:
            if not value:
                report.invalid(key_path, value, "is required", f"Set it, e.g. {key_path}={entry.key.required}")
        elif value is None and not entry.optional and entry.key.follows is None:
            report.problem(key_path, value, "must have a value", "Set one, or leave the key out for its default")


def optimizer_rules(path: str, optim: OptimConfig, report: Report) -> None:
    """Report invalid keys of the optimizer block at `path`."""
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        report.problem(f"{path}.betas", optim.betas, "must be two numbers from 0 to below 1", "Set e.g. [0.9,0.999]")


def packed_token_rules(path: str, block: Block, model: str, config: Block, report: Report) -> None:
    """Report keys of the block at `path` that require packed tokens, which the block at `model` disables; and shared
    prefixes in float32 on a GPU."""
    if get_path(config, f"{model}.use_remove_padding"):
        _shared_prefix_precision(path, block, config, report)
        return
    size, sharing = block["ulysses_sequence_parallel_size"], block["use_prefix_grouper"]
    why, fix = (
        f"it requires packed tokens, and {model}.use_remove_padding = False",
        f"Set {model}.use_remove_padding=True",
    )
    if size > 1:
        report.problem(join(path, "ulysses_sequence_parallel_size"), size, why, fix, (f"{model}.use_remove_padding",))
    if sharing == "true":
        report.problem(join(path, "use_prefix_grouper"), True, why, fix, (f"{model}.use_remove_padding",))


def _shared_prefix_precision(path: str, block: Block, config: Block, report: Report) -> None:
    if block["use_prefix_grouper"] != "true" or not precision_excludes_sharing(block, config):
        return
    precision = join(path, "fsdp_config.mixed_precision")
    why = f"on a GPU no attention kernel shares prefixes in float32, and {precision} = fp32"
    fix = f"Set it to auto or False, or {precision}=bf16"
    report.problem(join(path, "use_prefix_grouper"), True, why, fix, (precision,))


def sharing_exclusion(block: Block, config: Block, packs: bool) -> str | None:
    """Return why the settings of a block exclude shared prefixes, or None. `packs`: its model runs on packed tokens."""
    if block["strategy"] == "megatron":
        return "strategy = megatron computes the attention of whole rows only"
    if not packs:
        return "use_remove_padding = False"
    if precision_excludes_sharing(block, config):
        return "no attention kernel supports mixed_precision = fp32 on a GPU"
    return None


def precision_excludes_sharing(block: Block, config: Block) -> bool:
    """Whether the precision of a block excludes shared prefixes: float32 on a GPU, for which there is no kernel."""
    return config["trainer"].device == "cuda" and block["fsdp_config"].mixed_precision == "fp32"


def run_rules(trainer: RunConfig, report: Report) -> None:
    """Report names that escape the run's folder, inconsistent resume keys, and invalid keys of `trainer.record`."""
    for name in ("project_name", "experiment_name"):
        _check_folder_name(f"trainer.{name}", trainer[name], report)
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        why, fix = "trainer.resume_mode = resume_path needs a folder", "Set it to a …/global_step_N folder"
        report.problem("trainer.resume_from_path", None, why, fix)
    if trainer.resume_mode != "resume_path" and trainer.resume_from_path is not None:
        report.notice(
            f"trainer.resume_from_path = {show(trainer.resume_from_path)} has no effect with trainer.resume_mode = "
            f"{trainer.resume_mode}. Set trainer.resume_mode=resume_path to start from it."
        )
    for pattern in trainer.record.redact:
        try:
            re.compile(pattern)
        except re.error as error:
            why = f"is not a regular expression: {error}"
            report.problem("trainer.record.redact", pattern, why, "Correct it, e.g. escape special characters")
    url = trainer.record.alert_url
    if url is not None and not re.match(r"https?://[^/]", url):
        report.problem("trainer.record.alert_url", url, "is not the URL of a server", "Set it to https://host/path")


def _check_folder_name(key: str, name: str, report: Report) -> None:
    """Report a name that is empty, absolute or starts with `..`: names are parts of folder paths."""
    parts = os.path.normpath(name).split(os.sep)
    if not name.strip() or parts[0] in ("", ".", "..") or "\0" in name:
        why = "must name a folder inside the checkpoint path (checkpoints/<project_name>/<experiment_name>)"
        report.problem(key, name, why, "Set a plain name. For another folder set trainer.default_local_dir")


def user_code_rules(key: str, block: CustomClassConfig | SamplerConfig, report: Report) -> None:
    """Report a custom class with only a file or only a name."""
    if (block.path is None) != (block.name is None):
        missing, present = ("name", "path") if block.name is None else ("path", "name")
        why = f"{key}.{present} = {block[present]} is set, and both are required"
        report.problem(f"{key}.{missing}", None, why, f"Set {key}.{missing}")
