"""Config changes that reduce the memory of a phase, cheapest first, for the memory plan and out-of-memory errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.names import TRAINING_ENGINES
from verl.config.schema import get_path
from verl.planning.phases import ROLE_OF_PHASE

_POLICY, _CRITIC, _REWARD = "actor_rollout_ref", "critic", "reward_model"
_TEACHER = "distillation.teacher"
_ACTOR, _REF, _ROLLOUT = f"{_POLICY}.actor", f"{_POLICY}.ref", f"{_POLICY}.rollout"
_BLOCK_OF_ROLE = {
    "actor": _ACTOR,
    "ref": _REF,
    "rollout": _ROLLOUT,
    "critic": _CRITIC,
    "reward_model": _REWARD,
    "teacher": _TEACHER,
}
UNKNOWN: Any = object()
"""The value of a key that the configuration does not have."""
# (part of a key's name, cost of changing the key); the first match is used.
_COSTS = (
    ("micro_batch_size", "smaller micro-batches"),
    ("max_token_len", "smaller micro-batches"),
    ("checkpointing", "up to a third more compute"),
    ("reshard", "weights are gathered and cast again in the backward pass"),
    ("offload", "transfers every step"),
    ("state_dtype", "moments in bf16 with stochastic rounding"),
    ("parallel_size", "traffic between devices"),
    ("gpu_memory", "fewer sequences at once"),
    ("max_num", "fewer sequences at once"),
    ("_length", "changes the training"),
    ("save_contents", "no Hugging Face model in the checkpoint"),
    ("snapshot", "training waits while a checkpoint is written"),
)
# Keys that select where state is kept and for how long. Results stay bit-identical.
_PLACEMENT_KEYS = (
    *("reshard_after_forward", "param_offload", "optimizer_offload", "grad_offload"),
    *("gpu_memory_utilization", "free_cache_engine", "free_weights"),
)
# Keys outside fsdp_config that only the fsdp engine reads.
_FSDP_ONLY = ("ulysses_sequence_parallel_size", "optim.state_dtype")
# Smallest gpu_memory_utilization: below it, weights and a few sequences do not fit.
_MIN_UTILIZATION = 0.1


@dataclass(frozen=True)
class Remedy:
    """A key and how to change it: `halve`, `double`, `lower`, `on`, `off`, `bf16` (set it to bf16), or `hf_model`
    (remove it from a list)."""

    key: str
    action: str
    only_if: tuple[str, Any] | None = None
    """(key, value): the remedy applies only if another key has this value."""

    def values(self, now: Any, lowest: int = 1, highest: int = 1 << 30) -> Iterator[Any]:
        """Yield the values to try after the current value `now`, the smallest change first; none if no change is left.

        `lowest`, `highest`: bounds of `halve` and `double`.
        """
        if self.action in ("on", "off") and bool(now) != (self.action == "on"):
            yield self.action == "on"
        if self.action == "bf16" and now != "bf16":
            yield "bf16"
        if self.action == "hf_model" and isinstance(now, list) and self.action in now:
            yield [part for part in now if part != self.action]
        while self.action == "halve" and isinstance(now, int) and now > lowest:
            now = max(lowest, now // 2)
            yield now
        while self.action == "double" and isinstance(now, int) and now * 2 <= highest:
            now *= 2
            yield now
        while self.action == "lower" and isinstance(now, float) and now > _MIN_UTILIZATION + 1e-9:
            now = round(max(_MIN_UTILIZATION, now - 0.05), 2)
            yield now

    @property
    def role(self) -> str | None:
        """The role that the key belongs to; None: the whole run."""
        return next((role for role, block in _BLOCK_OF_ROLE.items() if self.key.startswith(f"{block}.")), None)

    @property
    def cost(self) -> str:
        """What the change costs, as text."""
        name = self.key.rpartition(".")[2]
        if self.action == "off" and "offload" in name:
            return "device memory"
        return next((cost for part, cost in _COSTS if part in name), "a little speed")

    @property
    def places_state(self) -> bool:
        """Whether the change selects only where state is kept, or for how long."""
        return self.key.endswith(_PLACEMENT_KEYS)

    @property
    def changes_training(self) -> bool:
        """Whether the change affects results beyond rounding: it shortens sequences."""
        return self.key.startswith("data.") and self.key.endswith("_length")

    def describe(self, now: Any) -> str:
        """Return the change as text: `key=True`, or `key (now 8): lower it`."""
        if self.action in ("on", "off", "bf16"):
            return f"{self.key}={ {'on': True, 'off': False}.get(self.action, self.action) }"
        change = {"double": "raise it", "hf_model": "leave hf_model out"}.get(self.action, "lower it")
        return f"{self.key}{'' if now is UNKNOWN else f' (now {now})'}: {change}"


def value_of(config: Any, key: str) -> Any:
    """Return the value of a key, or UNKNOWN."""
    try:
        return get_path(config, key)
    except (KeyError, AttributeError):
        return UNKNOWN


def remedies(phase: str, roles: Collection[str] | None = None) -> list[Remedy]:
    """Return the remedies of a phase (see `PHASES`) in the order of their cost.

    `roles`: roles on the same devices, whose keys are included; None: unknown, all are included.
    """
    included = None if roles is None else {None, ROLE_OF_PHASE.get(phase), *roles}
    return [remedy for remedy in _REMEDIES.get(phase, ()) if included is None or remedy.role in included]


def applicable_remedies(
    phase: str, value_of: Callable[[str], Any], roles: Collection[str] | None = None
) -> Iterator[tuple[Remedy, Any]]:
    """Yield the remedies that can still be applied, with the current value of the key, which is UNKNOWN if `value_of`
    does not know it."""
    for remedy in remedies(phase, roles):
        if not is_read_by_engine(remedy, value_of):
            continue
        if remedy.only_if is not None:
            other = value_of(remedy.only_if[0])
            if other is not UNKNOWN and other != remedy.only_if[1]:
                continue
        now = value_of(remedy.key)
        if now is UNKNOWN or next(remedy.values(now), None) is not None:
            yield remedy, now


def is_read_by_engine(remedy: Remedy, value_of: Callable[[str], Any]) -> bool:
    """Whether the training engine of the key's role reads the key; fsdp is assumed if the engine is unknown."""
    if remedy.role in (None, "rollout") or remedy.key.startswith(f"{_REWARD}.rollout."):
        return True
    if remedy.role == _REWARD and _is_reward_model_served(value_of):
        return False  # a served reward model has no training engine
    engine = TRAINING_ENGINES.get(value_of(f"{_BLOCK_OF_ROLE[remedy.role]}.strategy"), TRAINING_ENGINES["fsdp2"])
    other_blocks = {other.block for other in TRAINING_ENGINES.values()} - {engine.block}
    key = remedy.key
    return not other_blocks & set(key.split(".")) and (engine.block == "fsdp_config" or not key.endswith(_FSDP_ONLY))


def _is_reward_model_served(value_of: Callable[[str], Any]) -> bool:
    """Like `config.layout.serves_reward_model`, for a partially known configuration."""
    return value_of(f"{_REWARD}.judge.enable") is True or isinstance(value_of("custom_reward_function.path"), str)


def _for_all_engines(block: str, name: str, action: str) -> list[Remedy]:
    """Return remedies for a key that every training engine has in its block."""
    return [Remedy(f"{block}.{engine}.{name}", action) for engine in ("fsdp_config", "megatron_config")]


def _smaller_batches(block: str, size: str, tokens: str, dynamic: str = "use_dynamic_bsz") -> list[Remedy]:
    """Return remedies with fewer samples or tokens per micro-batch, which do not change results.

    `size`, `tokens`: names of the keys with the samples and with the token budget. `dynamic`: selects between them.
    """
    return [
        Remedy(f"{block}.{tokens}", "halve", (f"{block}.{dynamic}", True)),
        Remedy(f"{block}.{size}", "halve", (f"{block}.{dynamic}", False)),
    ]


def _offload_others(own: str, updating: bool = False) -> list[Remedy]:
    """Return remedies that offload optimizer states of all roles, and weights and gradients of all roles except `own`.

    `own`: the block of the role that runs this phase. `updating`: it needs its own optimizer state now.
    """
    moments = [(block, "optimizer_offload") for block in (_ACTOR, _CRITIC) if not updating or block != own]
    weights = [(block, "param_offload") for block in (_REF, _CRITIC, _REWARD, _ACTOR, _TEACHER) if block != own]
    # Only for megatron: the fsdp engine has no gradients between phases.
    gradients = [Remedy(f"{block}.megatron_config.grad_offload", "on") for block, _ in moments]
    offloads = (_for_all_engines(block, name, "on") for block, name in (*moments, *weights))
    return [*gradients, *itertools.chain.from_iterable(offloads)]


_UPDATE = ("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu")
_LOG_PROB = ("log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu", "log_prob_use_dynamic_bsz")
# Generation that overlaps training (async) cannot free its KV cache; a smaller one is possible.
_RELEASE_KV = [
    Remedy(f"{_ROLLOUT}.free_cache_engine", "on", ("trainer.mode", "sync")),
    Remedy(f"{_ROLLOUT}.gpu_memory_utilization", "lower", (f"{_ROLLOUT}.free_cache_engine", False)),
]
_RELEASE_ENGINE = [*_RELEASE_KV, Remedy(f"{_ROLLOUT}.free_weights", "on", ("trainer.mode", "sync"))]
_NO_OFFLOAD = [
    remedy
    for part in ("param", "grad", "optimizer")
    for block in (_TEACHER, _REF, _REWARD, _CRITIC, _ACTOR)
    for remedy in _for_all_engines(block, f"{part}_offload", "off")
]
_BF16_MOMENTS = [Remedy(f"{block}.optim.state_dtype", "bf16") for block in (_CRITIC, _ACTOR)]
_NO_HF_EXPORT = [Remedy(f"{block}.checkpoint.save_contents", "hf_model") for block in (_CRITIC, _ACTOR)]
_NO_SNAPSHOT = [Remedy(f"{block}.checkpoint.snapshot", "off") for block in (_CRITIC, _ACTOR)]
_SHORTER_SEQUENCES = [Remedy("data.max_response_length", "halve"), Remedy("data.max_prompt_length", "halve")]


def _inference_remedies(block: str, micro_batches: list[Remedy]) -> tuple[Remedy, ...]:
    """Return the remedies of a pass without gradient."""
    ulysses = Remedy(f"{block}.ulysses_sequence_parallel_size", "double")
    # Responses are scored while others are still generated, for which the engine needs its weights.
    release = _RELEASE_KV if block == _REWARD else _RELEASE_ENGINE
    return (*micro_batches, *release, ulysses, *_model_parallelism(block), *_offload_others(block), *_SHORTER_SEQUENCES)


def _model_parallelism(block: str) -> list[Remedy]:
    """Return remedies that divide a model over more ranks of the megatron engine."""
    return [Remedy(f"{block}.megatron_config.{size}_model_parallel_size", "double") for size in ("tensor", "pipeline")]


def _update_remedies(block: str, model: str) -> tuple[Remedy, ...]:
    """Return the remedies of an optimizer step; `model`: the block of the model's keys."""
    return (
        *_smaller_batches(block, *_UPDATE),
        Remedy(f"{model}.enable_gradient_checkpointing", "on"),
        *_RELEASE_ENGINE,
        Remedy(f"{block}.fsdp_config.reshard_after_forward", "on"),
        Remedy(f"{block}.ulysses_sequence_parallel_size", "double"),
        *_model_parallelism(block),
        *_offload_others(block, updating=True),
        Remedy(f"{block}.fsdp_config.grad_offload", "on"),
        Remedy(f"{block}.optim.state_dtype", "bf16"),
        *_SHORTER_SEQUENCES,
    )


_SUPERVISED = (
    *_smaller_batches("data", "micro_batch_size_per_gpu", "max_token_len_per_gpu"),
    Remedy("model.enable_gradient_checkpointing", "on"),
    Remedy("fsdp_config.reshard_after_forward", "on"),
    Remedy("ulysses_sequence_parallel_size", "double"),
    Remedy("fsdp_config.grad_offload", "on"),
    Remedy("optim.state_dtype", "bf16"),
    Remedy("data.max_length", "halve"),
)

_REMEDIES: dict[str, tuple[Remedy, ...]] = {
    "gen": (
        Remedy(f"{_ROLLOUT}.gpu_memory_utilization", "lower"),
        Remedy(f"{_ROLLOUT}.tensor_model_parallel_size", "double"),
        *_offload_others(_ROLLOUT),
        Remedy(f"{_ROLLOUT}.max_num_seqs", "halve"),
        Remedy(f"{_ROLLOUT}.max_num_batched_tokens", "halve"),
    ),
    "old_log_prob": _inference_remedies(_ACTOR, _smaller_batches(_ROLLOUT, *_LOG_PROB)),
    "ref": _inference_remedies(_REF, _smaller_batches(_REF, *_LOG_PROB)),
    "teacher": _inference_remedies(_TEACHER, _smaller_batches(_TEACHER, *_LOG_PROB)),
    "values": _inference_remedies(
        _CRITIC, _smaller_batches(_CRITIC, "forward_micro_batch_size_per_gpu", "forward_max_token_len_per_gpu")
    ),
    "reward": _inference_remedies(
        _REWARD, _smaller_batches(_REWARD, "micro_batch_size_per_gpu", "forward_max_token_len_per_gpu")
    ),
    "judge": (
        Remedy(f"{_REWARD}.rollout.gpu_memory_utilization", "lower"),
        *_RELEASE_KV,
        *_offload_others(_REWARD),
        Remedy(f"{_REWARD}.rollout.max_num_seqs", "halve"),
    ),
    "update_critic": _update_remedies(_CRITIC, f"{_CRITIC}.model"),
    "update_actor": _update_remedies(_ACTOR, f"{_POLICY}.model"),
    # Host phases.
    "train": (*_NO_SNAPSHOT, *_BF16_MOMENTS, *_NO_OFFLOAD),
    "save_checkpoint": (*_NO_SNAPSHOT, *_NO_HF_EXPORT, *_BF16_MOMENTS, *_NO_OFFLOAD),
    "sft_train": (Remedy("checkpoint.snapshot", "off"), Remedy("fsdp_config.grad_offload", "off")),
    "sft_save_checkpoint": (
        Remedy("checkpoint.snapshot", "off"),
        Remedy("checkpoint.save_contents", "hf_model"),
        Remedy("optim.state_dtype", "bf16"),
        Remedy("fsdp_config.grad_offload", "off"),
    ),
    "sft": _SUPERVISED,
    "rm": _SUPERVISED,
    "sft_answers": (
        Remedy("rollout.gpu_memory_utilization", "lower"),
        Remedy("optim.state_dtype", "bf16"),
        Remedy("rollout.max_num_seqs", "halve"),
        Remedy("rollout.max_num_batched_tokens", "halve"),
    ),
}
PHASES = tuple(_REMEDIES)
