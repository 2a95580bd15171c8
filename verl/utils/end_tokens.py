"""Token ids that end a response: the single definition for engines, agent loops, the gateway, SFT and reward models.

From here to the engine: `find_end_tokens` determines the ids. `response_end_tokens` (`workers/rollout/prompts.py`) puts
them into `meta_info["eos_token_id"]` of a generation, and `sampling_params` (same file) into
`SamplingParams.eos_token_ids`. Every engine ends a response at `SamplingParams.end_token_ids`: these and
`stop_token_ids` (`ignore_eos`: only `stop_token_ids`). Requests without `eos_token_id` use the engine's
`default_end_tokens` (`inference/build.py`), requests of agents use those of the loop worker (`agent/worker.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl.utils.turn_template import TurnTemplate

__all__ = ["EndTokens", "find_end_tokens"]

logger = logging.getLogger(__name__)

# Some templates write other end tokens when there are tools.
_TOOL = {
    "type": "function",
    "function": {"name": "tool", "description": "", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True)
class EndTokens:
    """Token ids that end a response."""

    named_by: Mapping[int, tuple[str, ...]]
    """By token id: the sources that name it (generation config, tokenizer, …)."""
    text_ids: frozenset[int] = frozenset()
    """Ids of `stop_token_ids` that are ordinary text: generation stops there, but they belong to the response, and the
    turn continues."""

    @property
    def ids(self) -> frozenset[int]:
        """All tokens at which generation stops."""
        return frozenset(self.named_by)

    @property
    def turn_ids(self) -> frozenset[int]:
        """Tokens that end a turn: they are not part of its text, and the next message may follow them."""
        return self.ids - self.text_ids

    def describe(self, tokenizer: Any, ignore_eos: bool = False) -> str:
        """Return one line for the log."""
        if not self.named_by:
            return "no token ends a response: all reach their length limit. Set rollout.stop_token_ids."
        ids = sorted(self.named_by)
        tokens = zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True)
        listed = ", ".join(f"{token} = {token_id} ({', '.join(self.named_by[token_id])})" for token_id, token in tokens)
        only = "rollout.ignore_eos = True: only those of stop_token_ids end a response" if ignore_eos else ""
        return f"end tokens: {listed}. {only or 'Each of them ends a response'}."


def find_end_tokens(
    path: str | None,
    model_config: Any,
    tokenizer: Any = None,
    template_kwargs: Mapping[str, Any] | None = None,
    stop_token_ids: Iterable[int] = (),
) -> EndTokens:
    """Collect the end tokens of generation config, model config, tokenizer, chat template and `stop_token_ids`.

    `path` is the model's folder, `model_config` its Hugging Face config; if both are None, only the tokenizer and its
    template are used. The template contributes the added tokens that it writes right after an answer and after a tool
    call; if it writes none, the tokens that open the next message (GLM's role tokens). Ids outside the model's
    vocabulary are left out; among `stop_token_ids` they are a ValueError.
    """
    vocab_size = (
        None if model_config is None else getattr(model_config.get_text_config(decoder=True), "vocab_size", None)
    )
    sources: dict[int, tuple[str, ...]] = {}
    for source, ids in _sources(path, model_config, tokenizer, template_kwargs or {}):
        for token_id in ids:
            in_vocab = token_id >= 0 and (vocab_size is None or token_id < vocab_size)
            if in_vocab and source not in sources.get(token_id, ()):
                sources[token_id] = (*sources.get(token_id, ()), source)
    stops = list(stop_token_ids)
    special = set() if tokenizer is None else _special_ids(tokenizer)
    text_ids = frozenset(token_id for token_id in stops if token_id not in special and token_id not in sources)
    for token_id in stops:
        if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
            raise ValueError(
                f"actor_rollout_ref.rollout.stop_token_ids: {token_id} is not a token id of {path or 'the tokenizer'}."
                f" Use ids from 0{'' if vocab_size is None else f' to {vocab_size - 1}'}."
            )
        sources[token_id] = (*sources.get(token_id, ()), "stop_token_ids")
    return EndTokens(sources, text_ids)


def _sources(
    path: str | None, model_config: Any, tokenizer: Any, template_kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, list[int]]]:
    """Yield each source with the ids that it names."""
    from transformers import GenerationConfig

    if path is not None:
        try:
            yield "generation config", _as_ids(GenerationConfig.from_pretrained(path).eos_token_id)
        except OSError:
            logger.debug("%s has no generation config", path)
    for part in () if model_config is None else (model_config, model_config.get_text_config(decoder=True)):
        yield "model config", _as_ids(getattr(part, "eos_token_id", None))
    if tokenizer is not None:
        yield "tokenizer", _as_ids(tokenizer.eos_token_id)
        yield "chat template", _template_ids(tokenizer, template_kwargs)


def _template_ids(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> list[int]:
    """Return the ids of the tokens with which the chat template ends turns, without and with tools."""
    if not (tokenizer.chat_template or template_kwargs.get("chat_template")):
        return []
    tokens: list[str] = []
    errors: list[Exception] = []
    for tools in (None, [_TOOL]):
        try:
            tokens += TurnTemplate(tokenizer, tools, template_kwargs).end_tokens()
        except Exception as error:  # noqa: BLE001 - a template is a program: it may raise anything
            errors.append(error)
    if len(errors) == 2:  # neither without nor with tools
        logger.warning(
            "the chat template cannot write an answer (%s: %s), so it names no end token. Set rollout.stop_token_ids to"
            " those that it uses, if the model's configuration does not name them.",
            type(errors[0]).__name__,
            errors[0],
        )
    return [tokenizer.convert_tokens_to_ids(token) for token in dict.fromkeys(tokens)]


def _special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of special tokens, including added ones that the tokenizer has no attribute for."""
    added = tokenizer.added_tokens_decoder.items()
    return set(tokenizer.all_special_ids) | {token_id for token_id, token in added if token.special}


def _as_ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
