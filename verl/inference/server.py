"""`python -m verl.inference.server --model PATH`: the embedded engine behind the OpenAI API, for this machine only.

Clients: `openai.OpenAI(base_url="http://127.0.0.1:8001/v1", api_key="any")`, or curl. SIGTERM and Ctrl-C let requests
under way finish for a while, then end the program with exit code 0; a second one ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from verl.config import ModelConfig, RolloutConfig, as_config
from verl.config.context_length import context_limit
from verl.inference.async_engine import AsyncEngine
from verl.inference.serving.app import OpenAIApp, in_options
from verl.inference.serving.openai_requests import ModelFacts
from verl.inference.serving.parsers import Parsers
from verl.utils.fs import resolve_model_path
from verl.utils.http_server.protocol import Limits, asgi_server, bound, warn_if_open
from verl.utils.logging_setup import setup_logging
from verl.utils.tokenizer import hf_tokenizer

if TYPE_CHECKING:
    from verl.inference.build import BuiltEngine

__all__ = ["main", "serve"]

logger = logging.getLogger("verl.inference.server")  # not "__main__", which is outside the one logging setup

DEFAULT_PORT = 8001


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal comes; 2 is the exit code of what cannot be started as asked."""
    options = _parser().parse_args(arguments)
    setup_logging()
    try:
        serve(options)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{in_options(str(error))}\n")
        return 2
    return 0


def serve(options: argparse.Namespace) -> None:
    """Load the model, then answer requests."""
    with bound(options.host, options.port) as taken:
        if options.api_key is None:
            warn_if_open(taken, "Set --api-key (or VERL_API_KEY), or leave out --host.")
        from verl.inference.build import build_engine
        from verl.inference.models.loading import read_model_config
        from verl.utils.device import get_device_name, resolve_dtype

        path = resolve_model_path(options.model, "--model")
        model_config = as_config(
            ModelConfig, {"path": path, "trust_remote_code": options.trust_remote_code}, at="actor_rollout_ref.model"
        )
        length = _longest(options.max_model_len, read_model_config(path, model_config))
        device = get_device_name() if options.device == "auto" else options.device
        dtype = resolve_dtype(options.dtype, device)
        load_tokenizer = partial(hf_tokenizer, path, trust_remote_code=options.trust_remote_code)
        with contextlib.closing(Parsers(load_tokenizer, options.max_parse_seconds)) as parsers:
            built = build_engine(path, model_config, _rollout_config(options, length), device, dtype)
            tokenizer = load_tokenizer()
            logger.info(built.end_tokens.described(tokenizer))
            # A tokenizer of its own for stop strings: the engine looks for them in its thread.
            with contextlib.closing(AsyncEngine(built.engine, load_tokenizer)) as engine:
                facts = _facts(options, built, length, tokenizer)
                body = options.max_body_mb * 2**20
                app = OpenAIApp(engine, built.engine.check, facts, tokenizer, parsers, body, options.api_key)
                what = f"{facts.names[0]} ({built.dtype}, {built.device})"
                parsers.wait_until_ready()
                limits = Limits(connections=options.max_connections)
                asyncio.run(asgi_server(app, what, limits, "/v1").serve([taken]))


def _facts(options: argparse.Namespace, built: BuiltEngine, length: int, tokenizer: Any) -> ModelFacts:
    return ModelFacts(
        _names(options),
        length,
        built.model.vocab_size,
        built.end_tokens.ids,
        max_answers=options.max_answers,
        client_templates=options.allow_client_templates,
        longest_token=max(map(len, tokenizer.get_vocab())),
    )


def _rollout_config(options: argparse.Namespace, length: int) -> RolloutConfig:
    return as_config(
        RolloutConfig,
        {
            "max_model_len": length,
            "max_num_seqs": options.max_num_seqs,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "enforce_eager": options.enforce_eager,
        },
    )


def _names(options: argparse.Namespace) -> tuple[str, ...]:
    """What clients may call the model: as it was given here, or just its folder's name."""
    if options.served_model_name:
        return (options.served_model_name,)
    return tuple(dict.fromkeys((options.model, os.path.basename(options.model.rstrip("/")))))


def _longest(asked: int | None, hf_config: Any) -> int:
    """Tokens a sequence may have: as asked, else the model's own limit."""
    limit = context_limit(hf_config.get_text_config(decoder=True).to_dict()) or asked
    if limit is None:
        raise ValueError(f"--max-model-len: this {hf_config.model_type} model names no limit of its own. Set it.")
    if asked is not None and asked > limit:
        raise ValueError(f"--max-model-len: {asked} is more than the {limit} positions of this model. Lower it.")
    return asked or limit


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m verl.inference.server", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", required=True, help="local folder, hub name, URL, or a global_step_N folder of ours")
    add("--served-model-name", help="what clients call it (default: as given to --model)")
    add("--host", default="127.0.0.1", help="address to serve on (default: %(default)s, this machine only)")
    add("--port", type=int, default=DEFAULT_PORT, help="port (default: %(default)s; 0: any that is free)")
    add(
        "--api-key",
        default=os.environ.get("VERL_API_KEY") or None,
        help="clients must send it (default: $VERL_API_KEY)",
    )
    add("--device", default="auto", help="cpu, cuda, cuda:1 … (default: a GPU where there is one)")
    add("--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"), help="of the weights")
    add("--max-model-len", type=_positive, help="longest prompt and answer together (default: the model's own limit)")
    add("--max-num-seqs", type=_positive, default=256, help="answers generated at once (default: %(default)s)")
    add("--gpu-memory-utilization", type=float, default=0.9, help="share of GPU memory to take (default: %(default)s)")
    add("--max-answers", type=_positive, default=1024, help="prompts × n of one request (default: %(default)s)")
    add("--max-body-mb", type=_positive, default=8, help="size of one request (default: %(default)s)")
    add("--max-connections", type=_positive, default=1024, help="clients at once (default: %(default)s)")
    add("--max-parse-seconds", type=float, default=10, help="for reading one request (default: %(default)s)")
    add(
        "--allow-client-templates", action="store_true", help="run chat templates that clients send, which are programs"
    )
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
