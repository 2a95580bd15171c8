"""`python -m verl.inference.server --model PATH`: the embedded engine behind the OpenAI API, for this machine only.

Clients: `openai.OpenAI(base_url="http://127.0.0.1:8001/v1", api_key="any")`, or curl. A sequence classifier, such as a
reward model, is served as /v1/rewards and /classify. After SIGTERM or Ctrl-C, requests in flight get a grace period;
then the program ends with exit code 0. A second signal ends it at once.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from verl.inference.serving.app import OpenAIServer, in_options
from verl.inference.serving.model import ModelLoader
from verl.inference.serving.openai_requests import parse
from verl.inference.serving.options import options_parser
from verl.inference.serving.parsers import Parsers
from verl.inference.serving.scoring import ScoringServer
from verl.inference.serving.scoring_requests import parse_scoring
from verl.utils.http_server.server import (
    ConnectionLimits,
    bind_socket,
    create_server,
    run_event_loop,
    warn_if_public,
)
from verl.utils.logging_setup import setup_logging
from verl.utils.resources import freeze_gc, use_single_heap

__all__ = ["ServedApp", "load_app", "main", "options_parser", "serve"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal arrives. Returns exit code 2 if the options are invalid or the server cannot start."""
    options = options_parser().parse_args(arguments)
    setup_logging()
    use_single_heap()
    try:
        serve(options)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{in_options(str(error))}\n")
        return 2
    return 0


def serve(options: argparse.Namespace) -> None:
    """Load the model, then serve requests."""
    with bind_socket(options.host, options.port) as bound:
        if options.api_key is None:
            warn_if_public(bound, "Set --api-key (or VERL_API_KEY), or leave out --host.")
        with contextlib.ExitStack() as resources:
            served = load_app(options, resources)
            freeze_gc()
            limits = ConnectionLimits(connections=options.max_connections)
            run_event_loop(create_server(served.app, served.description, limits, "/v1").serve([bound]))


@dataclass(frozen=True)
class ServedApp:
    """The application of a loaded model."""

    app: ASGIApp
    description: str
    """The model, its dtype and device, for the log."""
    offload: Callable[[], None]
    """Free the device memory; requests wait until `onload`."""
    onload: Callable[[], None]


def load_app(options: argparse.Namespace, resources: contextlib.ExitStack) -> ServedApp:
    """Load the model that the options name and build its application; closing `resources` unloads it."""
    loader, max_body_bytes = ModelLoader(options, options.task), options.max_body_mb * 2**20
    parse_body: Any = parse_scoring if loader.task == "classify" else parse
    parsers: Parsers[Any] = Parsers(parse_body, loader.load_tokenizer, options.max_parse_seconds)
    resources.enter_context(contextlib.closing(parsers))
    if loader.task == "classify":
        classifier, model_info, description = resources.enter_context(loader.load_classifier(options.max_answers))
        app = ScoringServer(classifier, model_info, parsers).app(max_body_bytes, options.api_key)
        served = ServedApp(app, description, classifier.offload, classifier.onload)
    else:
        model = resources.enter_context(loader.load_engine(options.max_answers, options.allow_client_templates))
        server = OpenAIServer(model.engine, model.check, model.model_info, model.tokenizer, parsers)
        app = server.app(max_body_bytes, options.api_key)
        served = ServedApp(app, model.description, model.offload, model.onload)
    parsers.wait_until_ready()
    return served


if __name__ == "__main__":
    sys.exit(main())
