"""Which token ids end an answer: the one place that says so, for training, validation, generation and serving."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["EndTokens", "find_end_tokens"]

logger = logging.getLogger(__name__)

# Stands for an answer in a conversation that is only written to see what follows it.
_ANSWER = "verl-end-of-answer"


@dataclass(frozen=True)
class EndTokens:
    """Token ids that end an answer, and who names each."""

    named_by: Mapping[int, tuple[str, ...]]

    @property
    def ids(self) -> frozenset[int]:
        return frozenset(self.named_by)

    def described(self, tokenizer: Any, ignore_eos: bool = False) -> str:
        """One line for the log."""
        if not self.named_by:
            return "no token ends an answer: each goes on to its length limit. Set rollout.stop_token_ids to have one."
        ids = sorted(self.named_by)
        tokens = zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True)
        shown = ", ".join(f"{token} = {number} ({', '.join(self.named_by[number])})" for number, token in tokens)
        only = "rollout.ignore_eos = True: only those of stop_token_ids end an answer" if ignore_eos else ""
        return f"end tokens: {shown}. {only or 'Each of them ends an answer'}."


def find_end_tokens(
    path: str,
    model_config: Any,
    tokenizer: Any = None,
    template_kwargs: Mapping[str, Any] | None = None,
    stop_token_ids: Iterable[int] = (),
) -> EndTokens:
    """Those of the generation config, the model config, the tokenizer, its chat template and `stop_token_ids`.

    `path` is the model's folder, `model_config` its Hugging Face config. The chat template's is what it writes right
    after an answer, where that is one special or added token. Ids that the model cannot sample are left out; among
    `stop_token_ids` they are an error.
    """
    vocab = getattr(model_config.get_text_config(decoder=True), "vocab_size", None)
    named: dict[int, tuple[str, ...]] = {}
    for source, ids in _sources(path, model_config, tokenizer, template_kwargs or {}):
        for number in ids:
            if number >= 0 and (vocab is None or number < vocab) and source not in named.get(number, ()):
                named[number] = (*named.get(number, ()), source)
    for number in stop_token_ids:
        if number < 0 or (vocab is not None and number >= vocab):
            raise ValueError(
                f"actor_rollout_ref.rollout.stop_token_ids: {number} is no token of {path}, whose ids go from 0 to"
                f" {(vocab or 0) - 1}. Correct it."
            )
        named[number] = (*named.get(number, ()), "stop_token_ids")
    return EndTokens(named)


def _sources(
    path: str, model_config: Any, tokenizer: Any, template_kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, list[int]]]:
    """(who, the ids it names)."""
    from transformers import GenerationConfig

    try:
        yield "generation config", _as_ids(GenerationConfig.from_pretrained(path).eos_token_id)
    except OSError:
        logger.debug("%s has no generation config", path)
    for part in (model_config, model_config.get_text_config(decoder=True)):
        yield "model config", _as_ids(getattr(part, "eos_token_id", None))
    if tokenizer is not None:
        yield "tokenizer", _as_ids(tokenizer.eos_token_id)
        yield "chat template", _as_ids(_end_of_turn(tokenizer, template_kwargs))


def _end_of_turn(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> int | None:
    """The special or added token that the chat template writes right after an answer, if it writes one."""
    if not (tokenizer.chat_template or template_kwargs.get("chat_template")):
        return None
    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=False, **template_kwargs
        )
    except Exception as error:  # noqa: BLE001 - a template is a program of the model's: it may raise anything
        logger.warning(
            "the chat template cannot write an answer (%s: %s), so it names no end token. Give those that it uses in"
            " rollout.stop_token_ids, if the model's own do not do.",
            type(error).__name__,
            error,
        )
        return None
    after = text.rpartition(_ANSWER)[2].lstrip() if _ANSWER in text else ""
    known = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    token = max((token for token in known if token and after.startswith(token)), key=len, default=None)
    return None if token is None else tokenizer.convert_tokens_to_ids(token)


def _as_ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
