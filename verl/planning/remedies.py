"""What to change when a phase needs more memory than there is, cheapest first: one table for plan and error alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_POLICY, _CRITIC, _REWARD = "actor_rollout_ref", "critic", "reward_model"
_ACTOR, _REF, _ROLLOUT = f"{_POLICY}.actor", f"{_POLICY}.ref", f"{_POLICY}.rollout"
UNKNOWN: Any = object()
"""The value of a key that is not in the configuration at hand."""
# Smaller shares leave an engine no room for its weights and a few sequences.
_LEAST_UTILIZATION = 0.1


@dataclass(frozen=True)
class Remedy:
    """One key, and which way it moves: `halve`, `on`, `double`, `lower`, or to `bf16`."""

    key: str
    way: str
    only_if: tuple[str, Any] | None = None
    """Another key that must have this value for the remedy to help."""

    def values(self, now: Any, least: int = 1, most: int = 1 << 30) -> Iterator[Any]:
        """Values to try after `now`, mildest first; none where it has gone all the way."""
        if self.way == "on" and not now:
            yield True
        if self.way == "bf16" and now == "fp32":
            yield "bf16"
        while self.way == "halve" and isinstance(now, int) and now > least:
            now = max(least, now // 2)
            yield now
        while self.way == "double" and isinstance(now, int) and now * 2 <= most:
            now *= 2
            yield now
        while self.way == "lower" and isinstance(now, float) and now > _LEAST_UTILIZATION + 1e-9:
            now = round(max(_LEAST_UTILIZATION, now - 0.05), 2)
            yield now

    def describe(self, now: Any) -> str:
        """`key=True`, or `key (now 8): halve it`."""
        if self.way in ("on", "bf16"):
            return f"{self.key}={'True' if self.way == 'on' else self.way}"
        what = {"halve": "lower it", "double": "raise it", "lower": "lower it"}[self.way]
        return f"{self.key}{'' if now is UNKNOWN else f' (now {now})'}: {what}"


def remedies(phase: str) -> tuple[Remedy, ...]:
    """For a phase of a training step (see `PHASES`), in the order of what they cost."""
    return _TABLE.get(phase, ())


def helpful(phase: str, value_of: Callable[[str], Any]) -> Iterator[tuple[Remedy, Any]]:
    """Those that can still move, with the key's value; `value_of` gives UNKNOWN where there is none."""
    for remedy in remedies(phase):
        if remedy.only_if is not None:
            other = value_of(remedy.only_if[0])
            if other is not UNKNOWN and other != remedy.only_if[1]:
                continue
        now = value_of(remedy.key)
        if now is UNKNOWN or next(remedy.values(now), None) is not None:
            yield remedy, now


def _cut(block: str, size: str, tokens: str, dynamic: str = "use_dynamic_bsz") -> list[Remedy]:
    """Fewer samples, or tokens, in a pass: results do not change."""
    return [
        Remedy(f"{block}.{tokens}", "halve", (f"{block}.{dynamic}", True)),
        Remedy(f"{block}.{size}", "halve", (f"{block}.{dynamic}", False)),
    ]


def _offload(*keys: str) -> list[Remedy]:
    return [Remedy(key, "on") for key in keys]


_UPDATE = ("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu")
_LOG_PROB = ("log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu", "log_prob_use_dynamic_bsz")
_KV_STAYS = [Remedy(f"{_ROLLOUT}.free_cache_engine", "on")]
_OTHERS_REST = _offload(
    f"{_ACTOR}.fsdp_config.optimizer_offload",
    f"{_CRITIC}.fsdp_config.optimizer_offload",
    f"{_REF}.fsdp_config.param_offload",
    f"{_CRITIC}.fsdp_config.param_offload",
    f"{_REWARD}.fsdp_config.param_offload",
)
_LENGTHS = [Remedy("data.max_response_length", "halve"), Remedy("data.max_prompt_length", "halve")]


def _scoring(block: str, size: str) -> tuple[Remedy, ...]:
    """A pass that gives numbers to answers: of the critic, of a reward model."""
    return (
        *_cut(block, size, "forward_max_token_len_per_gpu"),
        *_KV_STAYS,
        Remedy(f"{block}.ulysses_sequence_parallel_size", "double"),
        *_OTHERS_REST,
        *_offload(f"{_ACTOR}.fsdp_config.param_offload"),
        *_LENGTHS,
    )


def _update(block: str, model: str, beside: str) -> tuple[Remedy, ...]:
    """`beside`: the other role that learns."""
    return (
        *_cut(block, *_UPDATE),
        Remedy(f"{model}.enable_gradient_checkpointing", "on"),
        *_KV_STAYS,
        Remedy(f"{block}.fsdp_config.reshard_after_forward", "on"),
        Remedy(f"{block}.ulysses_sequence_parallel_size", "double"),
        *_offload(
            f"{beside}.fsdp_config.optimizer_offload",
            f"{_REF}.fsdp_config.param_offload",
            f"{beside}.fsdp_config.param_offload",
            f"{block}.fsdp_config.grad_offload",
        ),
        Remedy(f"{block}.optim.state_dtype", "bf16"),
        *_LENGTHS,
    )


_TABLE: dict[str, tuple[Remedy, ...]] = {
    "gen": (
        Remedy(f"{_ROLLOUT}.gpu_memory_utilization", "lower"),
        Remedy(f"{_ROLLOUT}.tensor_model_parallel_size", "double"),
        *_OTHERS_REST,
        *_offload(f"{_ACTOR}.fsdp_config.param_offload"),
        Remedy(f"{_ROLLOUT}.max_num_seqs", "halve"),
        Remedy(f"{_ROLLOUT}.max_num_batched_tokens", "halve"),
        *_LENGTHS,
    ),
    "old_log_prob": (
        *_cut(_ROLLOUT, *_LOG_PROB),
        *_KV_STAYS,
        Remedy(f"{_ACTOR}.ulysses_sequence_parallel_size", "double"),
        *_OTHERS_REST,
        *_LENGTHS,
    ),
    "ref": (
        *_cut(_REF, *_LOG_PROB),
        *_KV_STAYS,
        Remedy(f"{_REF}.ulysses_sequence_parallel_size", "double"),
        *_OTHERS_REST,
        *_offload(f"{_ACTOR}.fsdp_config.param_offload"),
        *_LENGTHS,
    ),
    "values": _scoring(_CRITIC, "forward_micro_batch_size_per_gpu"),
    "reward": _scoring(_REWARD, "micro_batch_size_per_gpu"),
    "update_critic": _update(_CRITIC, f"{_CRITIC}.model", beside=_ACTOR),
    "update_actor": _update(_ACTOR, f"{_POLICY}.model", beside=_CRITIC),
    "sft": (
        *_cut("data", "micro_batch_size_per_gpu", "max_token_len_per_gpu"),
        Remedy("model.enable_gradient_checkpointing", "on"),
        Remedy("fsdp_config.reshard_after_forward", "on"),
        Remedy("ulysses_sequence_parallel_size", "double"),
        *_offload("fsdp_config.grad_offload"),
        Remedy("optim.state_dtype", "bf16"),
        Remedy("data.max_length", "halve"),
    ),
}
PHASES = tuple(_TABLE)
