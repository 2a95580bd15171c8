"""The search agent's keys: what it turns on, how its lengths are read, and what does not fit."""

from __future__ import annotations

from verl.config.layout import ROLLOUT
from verl.config.ppo import PPOConfig
from verl.config.problems import Report


def resolve_search(config: PPOConfig, report: Report) -> None:
    """`do_search` needs answers that proceed on their own; a corpus of one's own needs no service."""
    retriever, rollout = config.retriever, config.actor_rollout_ref.rollout
    if retriever.corpus_path and "retriever.url" not in config.changed:
        retriever.url = None
    if not config.do_search:
        return
    if rollout.mode == "sync":
        rollout.mode = "async"
        report.notice(f"do_search = True: {ROLLOUT}.mode is async, so that every answer searches at its own pace.")
    _lengths_of_turns(config, report)


def search_rules(config: PPOConfig, report: Report) -> None:
    """Report what the search agent could not work with."""
    retriever, data = config.retriever, config.data
    if retriever.url and retriever.corpus_path:
        why = f"retriever.url = {retriever.url} is set too"
        report.problem("retriever.corpus_path", retriever.corpus_path, why, "Keep one of the two")
    if config.do_search and not retriever.url and not retriever.corpus_path:
        fix = "Set it to a service (http://127.0.0.1:8000/retrieve), or retriever.corpus_path to a file"
        report.problem("retriever.url", retriever.url, "do_search = True needs something to search", fix)
    if data.max_start_length is not None and data.max_start_length > data.max_prompt_length:
        why = f"is more than data.max_prompt_length = {data.max_prompt_length}"
        report.problem("data.max_start_length", data.max_start_length, why, "Lower it, or leave it out")
    if config.do_search and data.max_obs_length >= data.max_response_length:
        why = (
            f"information of one turn alone fills data.max_response_length = {data.max_response_length}, which is for "
            "all turns together"
        )
        report.problem("data.max_obs_length", data.max_obs_length, why, "Lower it, or raise data.max_response_length")


def _lengths_of_turns(config: PPOConfig, report: Report) -> None:
    """Search-R1 writes the length of one turn and of the whole context; ours are the prompt's and all turns'."""
    data = config.data
    start, context, turn = data.max_start_length, data.max_prompt_length, data.max_response_length
    if start is None or start >= context:
        return
    data.max_prompt_length, data.max_response_length = start, context - start + turn
    if data.max_turn_length is None:
        data.max_turn_length = turn
    report.notice(
        f"data.max_start_length = {start}: lengths are read as Search-R1 writes them: prompts up to {start} tokens, "
        f"one turn {data.max_turn_length}, all turns with their information {data.max_response_length}."
    )
