"""Batch columns that are the trainer's own: a column of the data with such a name is kept under another one."""

from __future__ import annotations

from collections.abc import Iterable

# Which rows form a group, which sample of its prompt a row is, whether it is sampled: the data must not say so.
_ROWS = {
    *("uid", "sample_index", "do_sample", "row", "index", "raw_prompt"),
    *("finish_reason", "scoring_failed", "scoring_error"),
}
_TENSORS = {
    *("input_ids", "attention_mask", "position_ids", "prompts", "responses", "response_mask"),
    *("rollout_log_probs", "rollout_drawn_log_probs", "rollout_versions", "rollout_is_weights"),
    *("old_log_probs", "ref_log_prob", "entropys"),
    *("values", "advantages", "returns", "rm_scores", "reward_baselines", "token_level_scores", "token_level_rewards"),
}
RESERVED = frozenset(_ROWS | _TENSORS)


def names_in_batch(columns: Iterable[str]) -> dict[str, str]:
    """For every column of the data the name that it has in a batch: its own, or with `data_` before a reserved one."""
    columns = list(columns)
    taken, names = {*columns, *RESERVED}, {}
    for column in columns:
        name = column
        if column in RESERVED:
            while name in taken:
                name = f"data_{name}"
            taken.add(name)
        names[column] = name
    return names
