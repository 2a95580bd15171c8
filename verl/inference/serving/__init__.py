"""The OpenAI-compatible API of inference servers.

Their command-line options are here because this file imports neither torch nor a server, so that help appears at once.
"""

from __future__ import annotations

import argparse

from verl.config.command_line import program_name
from verl.utils.http_server import add_server_options, positive

__all__ = ["DEFAULT_PORT", "add_model_options", "options_parser"]

DEFAULT_PORT = 8001


def options_parser() -> argparse.ArgumentParser:
    """Return the parser of `python -m verl.inference.server` and `verl serve`."""
    parser = argparse.ArgumentParser(
        prog=program_name("verl.inference.server"),
        description="Serve a model with the OpenAI API, or a reward model, on this machine.",
    )
    add_model_options(parser)
    add_server_options(parser, DEFAULT_PORT, max_body_mb=8)
    add = parser.add_argument
    add(
        "--task",
        default="auto",
        choices=("auto", "generate", "classify"),
        help="classify: score with a sequence classifier (default: by the architecture of the model)",
    )
    add(
        "--max-num-batched-tokens",
        type=positive,
        default=16384,
        help="tokens per batch of a classifier (default: %(default)s)",
    )
    add("--enable-lora", action="store_true", help="load LoRA adapters by /v1/load_lora_adapter and --lora-modules")
    add("--max-loras", type=positive, default=4, help="adapters loaded at the same time (default: %(default)s)")
    add("--max-lora-rank", type=positive, default=32, help="largest rank of an adapter (default: %(default)s)")
    add("--lora-modules", nargs="+", default=[], metavar="NAME=PATH", help="adapters to load at the start")
    add("--lora-root", metavar="DIR", help="clients load adapters only from below this folder (default: from any)")
    add("--max-answers", type=positive, default=1024, help="maximum prompts × n of one request (default: %(default)s)")
    add(
        "--max-parse-seconds",
        type=float,
        default=10,
        help="time limit for parsing one request (default: %(default)s)",
    )
    add("--allow-client-templates", action="store_true", help="run chat templates sent by clients; these are programs")
    return parser


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model and its device."""
    add = parser.add_argument
    add("--model", required=True, help="local folder, hub name, URL, or a global_step_N folder of a training run")
    add("--served-model-name", help="name of the model in requests (default: the value of --model)")
    add("--device", default="auto", help="cpu, cuda, cuda:1 … (default: a GPU if there is one)")
    add("--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"), help="dtype of the weights")
    add(
        "--max-model-len",
        type=positive,
        help="maximum tokens of a prompt and its response (default: the model's limit)",
    )
    add(
        "--max-num-seqs", type=positive, default=256, help="responses generated at the same time (default: %(default)s)"
    )
    add(
        "--gpu-memory-utilization", type=float, default=0.9, help="fraction of GPU memory to use (default: %(default)s)"
    )
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add("--trust-remote-code", action="store_true", help="run Python code of the model's folder")
