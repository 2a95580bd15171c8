"""The program of `verl.inference.server`: load the model of its options, then serve requests until a signal arrives."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from verl.inference.serving.api import ActivityLog, example_request
from verl.inference.serving.app import OpenAIServer
from verl.inference.serving.model import ModelLoader
from verl.inference.serving.openai_requests import parse
from verl.inference.serving.parsers import Parsers
from verl.inference.serving.scoring import ScoringServer
from verl.inference.serving.scoring_requests import parse_scoring
from verl.utils.console import show_startup, startup_phase
from verl.utils.http_server.server import (
    ConnectionLimits,
    bind_socket,
    create_server,
    run_event_loop,
    warn_if_public,
)
from verl.utils.resources import freeze_gc

__all__ = ["ServedApp", "load_app", "serve"]


def serve(options: argparse.Namespace) -> None:
    """Load the model, then serve requests."""
    with bind_socket(options.host, options.port) as bound:
        if options.api_key is None:
            warn_if_public(bound, "Set --api-key (or VERL_API_KEY), or leave out --host.")
        with contextlib.ExitStack() as resources:
            with show_startup():
                served = load_app(options, resources)
            freeze_gc()
            limits = ConnectionLimits(connections=options.max_connections)
            name, needs_key = options.served_model_name or options.model, options.api_key is not None
            example = partial(example_request, name, served.has_template, needs_key)
            with ActivityLog(served.app, served.tokens, served.unfinished) as app:
                server = create_server(app, served.description, limits, "/v1", example=example)
                run_event_loop(server.serve([bound]))


@dataclass(frozen=True)
class ServedApp:
    """The application of a loaded model."""

    app: ASGIApp
    description: str
    """The model, its dtype and device, for the log."""
    offload: Callable[[], None]
    """Free the device memory; requests wait until `onload`."""
    onload: Callable[[], None]
    tokens: Callable[[], int]
    """Return the number of generated tokens."""
    unfinished: Callable[[], int]
    """Return the number of requests in progress."""
    has_template: bool | None = None
    """Whether the model has a chat template; None: it is a classifier."""


def load_app(options: argparse.Namespace, resources: contextlib.ExitStack) -> ServedApp:
    """Load the model that the options name and build its application; closing `resources` unloads it."""
    with startup_phase("model config"):  # imports transformers
        loader, max_body_bytes = ModelLoader(options, options.task), options.max_body_mb * 2**20
    parse_body: Any = parse_scoring if loader.task == "classify" else parse
    parsers: Parsers[Any] = Parsers(parse_body, loader.load_tokenizer, options.max_parse_seconds)
    resources.enter_context(contextlib.closing(parsers))
    if loader.task == "classify":
        with startup_phase("model"):
            classifier, model_info, description = resources.enter_context(loader.load_classifier(options.max_answers))
        served = ServedApp(
            ScoringServer(classifier, model_info, parsers).app(max_body_bytes, options.api_key),
            description,
            offload=classifier.offload,
            onload=classifier.onload,
            tokens=lambda: 0,
            unfinished=lambda: classifier.unfinished,
        )
    else:
        with startup_phase("model and engine"):
            model = resources.enter_context(loader.load_engine(options.max_answers, options.allow_client_templates))
        engine = model.engine
        root = None if options.lora_root is None else Path(options.lora_root)
        server = OpenAIServer(engine, model.check, model.model_info, model.tokenizer, parsers, model.loras, root)
        served = ServedApp(
            server.app(max_body_bytes, options.api_key),
            model.description,
            offload=model.offload,
            onload=model.onload,
            tokens=lambda: engine.counts()[2],
            unfinished=lambda: engine.unfinished,
            has_template=bool(model.tokenizer.chat_template),
        )
    with startup_phase("tokenizer processes"):
        parsers.wait_until_ready()
    return served
