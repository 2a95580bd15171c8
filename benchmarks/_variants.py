"""What is measured: everything on, and one feature off in turn, each as overrides of a real configuration."""

from __future__ import annotations

from _training_work import Work

MODEL, ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout", "ref"))


def base(work: Work, budget: int, checkpointing: bool, compiled: bool) -> list[str]:
    """Everything on, in micro-batches of `budget` tokens; passes without gradients take four times as many."""
    return [
        f"{MODEL}.use_remove_padding=True",
        f"{MODEL}.enable_gradient_checkpointing={checkpointing}",
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{ACTOR}.ppo_max_token_len_per_gpu={max(budget, work.sequence)}",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu={4 * max(budget, work.sequence)}",
        f"{REF}.log_prob_max_token_len_per_gpu={4 * max(budget, work.sequence)}",
        f"{ACTOR}.use_torch_compile={compiled}",
        f"{ACTOR}.old_log_prob_from_update=True",
    ]


def fixed_rows(work: Work, budget: int) -> list[str]:
    """Micro-batches of as many rows as never exceed the budget, however long: what is safe without knowing lengths."""
    rows = max(1, budget // work.sequence)
    return [
        f"{ACTOR}.use_dynamic_bsz=False",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu={min(rows, work.samples)}",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={min(4 * rows, work.samples)}",
        f"{REF}.log_prob_micro_batch_size_per_gpu={min(4 * rows, work.samples)}",
    ]


def variants(work: Work, budget: int, checkpointing: bool, compiled: bool) -> dict[str, list[str]]:
    """Overrides by name. Padded rows come in fixed numbers: a budget of real tokens does not bound padded ones."""
    on = base(work, budget, checkpointing, compiled)
    fixed = fixed_rows(work, budget)
    padded = [*fixed, f"{MODEL}.use_remove_padding=False"]
    separate = [f"{ACTOR}.old_log_prob_from_update=False"]
    plain = [*padded, *separate, f"{ACTOR}.use_torch_compile=False", "reward_model.overlap=False"]
    return {
        "all on": on,
        "no dynamic": [*on, *fixed],
        "no remove_padding": [*on, *padded],
        f"{'no' if checkpointing else 'with'} checkpointing": [
            *on,
            f"{MODEL}.enable_gradient_checkpointing={not checkpointing}",
        ],
        "checkpointing, 4 × the tokens": [
            *on,
            f"{MODEL}.enable_gradient_checkpointing=True",
            f"{ACTOR}.ppo_max_token_len_per_gpu={4 * max(budget, work.sequence)}",
        ],
        f"{'no' if compiled else 'with'} compile": [*on, f"{ACTOR}.use_torch_compile={not compiled}"],
        "separate old log-probs": [*on, *separate],
        "rewards afterwards": [*on, "reward_model.overlap=False"],
        "keep the KV cache": [*on, f"{ROLLOUT}.free_cache_engine=False"],
        "with reference": [*on, f"{ACTOR}.use_kl_loss=True"],
        "everything off": [*on, *plain],
    }


# Variants that change the training engine, which `--engine-only` runs without Ray; names by prefix of the above.
ENGINE_VARIANTS = (
    "all on",
    "no dynamic",
    "no remove_padding",
    "checkpointing",
    "compile",
    "separate old",
    "everything off",
)


def chosen(names: dict[str, list[str]], features: list[str]) -> dict[str, list[str]]:
    """Those whose name contains one of `features`; all when there are none."""
    wanted = [feature.replace("_", " ") for feature in features]
    found = {
        name: given for name, given in names.items() if any(feature in name.replace("_", " ") for feature in wanted)
    }
    if features and not found:
        raise SystemExit(f"--features {' '.join(features)}: none of {', '.join(names)}.")
    return found if features else names
