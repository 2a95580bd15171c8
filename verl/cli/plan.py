"""`verl plan`: memory and time of a run on given hardware, without GPU and weights.

    verl plan actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct algorithm=grpo --gpu 4090 --gpus 2
    verl plan sft model.path=~/models/base data.max_length=8192 --gpu h100-80g --json

Exit codes: 0 the run fits, 1 it does not, 2 invalid input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.cli.run_config import YAML_FILES, add_run_arguments, compose_user_file, parse_run_arguments

if TYPE_CHECKING:  # imported when arguments have been parsed, so that --help is immediate
    from verl.planning.catalog import GPU
    from verl.planning.report import PlannedRun

_DEFAULT_GPU = "h200"


def main(arguments: list[str]) -> int:
    """Print the plan of a run; return the exit code."""
    options = parse_arguments(arguments)
    from verl.config.problems import ConfigError
    from verl.planning.report import as_dict, plan_report, render

    try:
        report = plan_report(planned_run(options))
    except (ConfigError, ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write((json.dumps(as_dict(report), indent=2) if options.json else render(report)) + "\n")
    return 1 if report.verdict == "too large" else 0


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; `program` is train, sft or rm."""
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "verl plan",
        description=description,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--gpu",
        help=f"h200, h100-80g, a100-80g, a100-40g, l40s, 4090, or GB of memory (default: this machine's GPU, "
        f"else {_DEFAULT_GPU})",
    )
    parser.add_argument("--gpus", type=_positive, help="GPUs per node (trainer.n_gpus_per_node)")
    parser.add_argument("--nodes", type=_positive, help="number of nodes (trainer.nnodes)")
    parser.add_argument("--host-gb", type=float, help="memory of a node in GB (default: not limited with --gpu)")
    parser.add_argument("--prompt-tokens", type=_positive, help="mean prompt length, for times (default: the maximum)")
    parser.add_argument("--response-tokens", type=_positive, help="mean response length, for times")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parse_run_arguments(parser, arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text}")
    return int(text)


# ---------------------------------------------------------------- configuration and hardware


def planned_run(options: argparse.Namespace) -> PlannedRun:
    """Return the run that the options describe. Raises ConfigError or ValueError with the messages of the run."""
    from verl.config.load import ROOTS, load_config
    from verl.config.ppo import PPOConfig
    from verl.planning.check import decide_partial_kv
    from verl.planning.report import PlannedRun
    from verl.planning.seconds import MeanLengths

    root = next(root for root in ROOTS if root.yaml == YAML_FILES[options.program])
    gpu, notes = _gpu(options)
    tree = compose_user_file(options)
    overrides = _overrides(options, tree, "cpu" if gpu is None else "cuda")

    def load(more: Sequence[str]) -> Any:
        return load_config(tree, [*overrides, *more], check_files=False, root=root.cls)

    config = load(())
    folders, other_notes = _model_folders(config)
    shapes, missing = _shapes(config, folders)
    device, host = _memory(options, config, gpu)
    lengths = MeanLengths(options.prompt_tokens, options.response_tokens)
    run = PlannedRun(config, load, shapes, gpu, device, host, lengths, (*notes, *other_notes, *missing))
    decided = decide_partial_kv(config, run.plan) if isinstance(config, PPOConfig) else []
    return replace(run, notes=(*run.notes, *decided))


def _gpu(options: argparse.Namespace) -> tuple[GPU | None, list[str]]:
    """Return the GPU to plan for, None for a run on CPUs, and notes."""
    from verl.config.devices import gpu_memory, has_no_gpu
    from verl.planning.catalog import find_gpu, gpu_of_device

    if options.gpu is not None:
        return find_gpu(options.gpu), []
    if "trainer.device=cpu" in options.overrides:
        return None, []
    local = gpu_memory()
    if local is not None:
        total, name = local
        return gpu_of_device(name, total), []
    why = "this machine has no GPU" if has_no_gpu() else "the memory of this machine's GPU is unknown"
    return find_gpu(_DEFAULT_GPU), [f"planned for the {_DEFAULT_GPU}, as {why}. Set --gpu."]


def _overrides(options: argparse.Namespace, tree: Any, device: str) -> list[str]:
    """Return overrides: defaults of keys that a plan does not require, then the user's overrides, then the hardware of
    the options."""
    from omegaconf import OmegaConf

    from verl.config.devices import visible_gpu_count

    defaults = {
        "data.train_files": "train.parquet",  # not read
        "trainer.device": device,
        "trainer.n_gpus_per_node": visible_gpu_count() or 1,
    }
    in_tree = [key for key in defaults if tree is not None and OmegaConf.select(tree, key) not in (None, "auto", [])]
    first = [f"{key}={value}" for key, value in defaults.items() if key not in in_tree]
    hardware = {"trainer.n_gpus_per_node": options.gpus, "trainer.nnodes": options.nodes}
    if options.gpu is not None:
        hardware["trainer.device"] = device
    last = [f"{key}={value}" for key, value in hardware.items() if value is not None]
    return [*first, *([] if tree is not None else options.overrides), *last]


def _memory(options: argparse.Namespace, config: Any, gpu: GPU | None) -> tuple[Any, Any]:
    """Return the memory of a device and of a node; None: not limited."""
    from verl.planning.check import RESERVED, available_memory
    from verl.planning.host import HostMemory
    from verl.planning.phases import GB

    device, host = available_memory(config.trainer) if options.gpu is None else (None, None)
    if options.host_gb is not None:
        installed = int(options.host_gb * GB)
        host = HostMemory(int(installed * (1 - RESERVED)), installed=installed)
    return device if gpu is None else gpu.memory, host


# ---------------------------------------------------------------- models


def _model_folders(config: Any) -> tuple[dict[str, str], list[str]]:
    """Return local folders with the config.json of the models of a run by path, and notes.

    Of a model on the hub only its config.json is fetched, unless its shape is known.
    """
    from verl.config import PPOConfig
    from verl.planning.catalog import known_name
    from verl.trainer.common.preflight import model_paths
    from verl.utils.fs import expand_path, is_hub_id, resolve_model_path

    paths = model_paths(config) if isinstance(config, PPOConfig) else {"model.path": config.model.path}
    folders, notes = {}, []
    for key, path in paths.items():
        local = Path(expand_path(path))
        if local.name == "config.json" and local.is_file():
            folders[path] = str(local.parent)
        elif local.exists() or not is_hub_id(path):
            folders[path] = resolve_model_path(path, key)
        elif (cached := hub_config(path, key, download=known_name(path) is None)) is not None:
            folders[path] = cached
        else:
            notes.append(f"{path} is not on this machine: planned with the known shape of {known_name(path)}.")
        if path in folders:
            _check_config_file(key, Path(folders[path]))
    return folders, list(dict.fromkeys(notes))


def hub_config(name: str, key: str, download: bool) -> str | None:
    """Return the local folder with the config.json of a hub model; `download`: fetch it if it is not in the cache."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    from verl.utils.fs import HubRepo, find_hub_problems

    file = try_to_load_from_cache(name, "config.json")
    if isinstance(file, str):
        return os.path.dirname(file)
    if not download:
        return None
    problem = find_hub_problems([HubRepo(name)]).get(HubRepo(name))
    if problem is not None:
        raise ValueError(f"{key}: {problem}")
    return os.path.dirname(hf_hub_download(name, "config.json"))


def _check_config_file(key: str, folder: Path) -> None:
    """Raise ValueError if a folder has no config.json of a model."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{key}: {folder} has no config.json. Use the folder of a model in Hugging Face format.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{key}: {file} is not valid JSON ({error}). Copy it again from the model.") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ValueError(
            f"{key}: {file} is not the config of a model: it has no model_type. Use that of a language model."
        )


def _shapes(config: Any, folders: Mapping[str, str]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the shapes of the models by role, and notes. Raises ConfigError for layouts that models do not allow."""
    from verl.config import PPOConfig
    from verl.config.context_length import check_context_length
    from verl.config.megatron import check_model_layouts
    from verl.config.problems import ConfigError, Report
    from verl.config.schema import get_path
    from verl.config.supervised import context_rules
    from verl.planning.check import (
        check_megatron_support,
        exclude_shared_prefixes,
        exclude_supervised_sharing,
        model_shapes,
        supervised_shape,
    )

    is_ppo = isinstance(config, PPOConfig)
    key = "actor_rollout_ref.model.path" if is_ppo else "model.path"
    path = get_path(config, key)
    try:
        if is_ppo:
            check_context_length(config, folders)
            check_model_layouts(config, folders)
            check_megatron_support(config, folders)
            shapes, missing = model_shapes(config, folders)
            exclude_shared_prefixes(config, shapes)
            notes = [f"without the {role}: its model is not on this machine." for role in missing if role != "actor"]
        else:
            report, folder = Report(), folders.get(path, path)
            context_rules(config, report, folder)
            report.raise_if_any()
            shape = supervised_shape(config, folder)
            if shape is not None:
                exclude_supervised_sharing(config, shape)
            shapes, notes = ({} if shape is None else {"actor": shape}), []
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError) as error:
        file = Path(folders.get(path, path)) / "config.json"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{key}: no model can be built from {file}: {reason.rstrip('.')}. Use another model, or another version of"
            " transformers."
        ) from error
    if "actor" not in shapes:
        raise ValueError(f"{key}: the config.json of {path} is not that of a language model. Use another model.")
    return shapes, notes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
