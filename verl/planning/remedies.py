"""What to change when a phase needs more memory than there is, cheapest first: one table for plan and error alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.names import TRAINING_ENGINES
from verl.config.schema import pick
from verl.planning.phases import ROLE_OF_PHASE

_POLICY, _CRITIC, _REWARD = "actor_rollout_ref", "critic", "reward_model"
_TEACHER = "distillation.teacher"
_ACTOR, _REF, _ROLLOUT = f"{_POLICY}.actor", f"{_POLICY}.ref", f"{_POLICY}.rollout"
_BLOCKS = {
    "actor": _ACTOR,
    "ref": _REF,
    "rollout": _ROLLOUT,
    "critic": _CRITIC,
    "reward_model": _REWARD,
    "teacher": _TEACHER,
}
UNKNOWN: Any = object()
"""The value of a key that is not in the configuration at hand."""
# Parts of keys' names, and what moving them costs.
_COSTS = (
    ("micro_batch_size", "smaller passes"),
    ("max_token_len", "smaller passes"),
    ("checkpointing", "a third more compute"),
    ("reshard", "weights are cast layer by layer"),
    ("offload", "transfers every step"),
    ("state_dtype", "moments are rounded at random"),
    ("parallel_size", "traffic between devices"),
    ("gpu_memory", "fewer sequences at once"),
    ("max_num", "fewer sequences at once"),
    ("_length", "another training"),
    ("save_contents", "no folder for transformers beside the checkpoint"),
    ("snapshot", "training waits while a checkpoint is written"),
)
# Of a role, read by fsdp alone.
_OF_FSDP = ("ulysses_sequence_parallel_size", "optim.state_dtype")
# Smaller shares leave an engine no room for its weights and a few sequences.
_LEAST_UTILIZATION = 0.1


@dataclass(frozen=True)
class Remedy:
    """One key, and which way it moves: `halve`, `on`, `off`, `double`, `lower`, to `bf16`, or by leaving
    `hf_model` out."""

    key: str
    way: str
    only_if: tuple[str, Any] | None = None
    """Another key that must have this value for the remedy to help."""

    def values(self, now: Any, least: int = 1, most: int = 1 << 30) -> Iterator[Any]:
        """Values to try after `now`, mildest first; none where it has gone all the way."""
        if self.way in ("on", "off") and bool(now) != (self.way == "on"):
            yield self.way == "on"
        if self.way == "bf16" and now != "bf16":
            yield "bf16"
        if self.way == "hf_model" and isinstance(now, list) and self.way in now:
            yield [part for part in now if part != self.way]
        while self.way == "halve" and isinstance(now, int) and now > least:
            now = max(least, now // 2)
            yield now
        while self.way == "double" and isinstance(now, int) and now * 2 <= most:
            now *= 2
            yield now
        while self.way == "lower" and isinstance(now, float) and now > _LEAST_UTILIZATION + 1e-9:
            now = round(max(_LEAST_UTILIZATION, now - 0.05), 2)
            yield now

    @property
    def role(self) -> str | None:
        """Whose key it is; None: the run's."""
        return next((role for role, block in _BLOCKS.items() if self.key.startswith(f"{block}.")), None)

    @property
    def cost(self) -> str:
        """What is paid for it."""
        name = self.key.rpartition(".")[2]
        if self.way == "off" and "offload" in name:
            return "device memory"
        return next((cost for part, cost in _COSTS if part in name), "a little speed")

    @property
    def changes_training(self) -> bool:
        return self.key.startswith("data.") and self.key.endswith("_length")

    def describe(self, now: Any) -> str:
        """`key=True`, or `key (now 8): lower it`."""
        if self.way in ("on", "off", "bf16"):
            return f"{self.key}={ {'on': True, 'off': False}.get(self.way, self.way) }"
        what = {"double": "raise it", "hf_model": "leave hf_model out"}.get(self.way, "lower it")
        return f"{self.key}{'' if now is UNKNOWN else f' (now {now})'}: {what}"


def value_of(config: Any, key: str) -> Any:
    """The value of a key, or UNKNOWN."""
    try:
        return pick(config, key)
    except (KeyError, AttributeError):
        return UNKNOWN


def remedies(phase: str, roles: Collection[str] | None = None) -> list[Remedy]:
    """For a phase of a device or a host (see `PHASES`), in the order of what they cost: of its own role and of `roles`,
    those that are there (None: not known, any)."""
    there = None if roles is None else {None, ROLE_OF_PHASE.get(phase), *roles}
    return [remedy for remedy in _TABLE.get(phase, ()) if there is None or remedy.role in there]


def helpful(
    phase: str, value_of: Callable[[str], Any], roles: Collection[str] | None = None
) -> Iterator[tuple[Remedy, Any]]:
    """Those that can still move, with the key's value; `value_of` gives UNKNOWN where there is none."""
    for remedy in remedies(phase, roles):
        if not is_read(remedy, value_of):
            continue
        if remedy.only_if is not None:
            other = value_of(remedy.only_if[0])
            if other is not UNKNOWN and other != remedy.only_if[1]:
                continue
        now = value_of(remedy.key)
        if now is UNKNOWN or next(remedy.values(now), None) is not None:
            yield remedy, now


def is_read(remedy: Remedy, value_of: Callable[[str], Any]) -> bool:
    """Whether the training engine of the key's role reads it; where that is not known, as fsdp does."""
    if remedy.role in (None, "rollout") or remedy.key.startswith(f"{_REWARD}.rollout."):
        return True
    if remedy.role == _REWARD and _is_served(value_of):
        return False  # no training engine has it
    row = TRAINING_ENGINES.get(value_of(f"{_BLOCKS[remedy.role]}.strategy"), TRAINING_ENGINES["fsdp2"])
    others = {other.block for other in TRAINING_ENGINES.values()} - {row.block}
    key = remedy.key
    return not others & set(key.split(".")) and (row.block == "fsdp_config" or not key.endswith(_OF_FSDP))


def _is_served(value_of: Callable[[str], Any]) -> bool:
    """As `serves_reward_model` of the configuration, as far as it is known."""
    return value_of(f"{_REWARD}.judge.enable") is True or isinstance(value_of("custom_reward_function.path"), str)


def _of_engines(block: str, name: str, way: str) -> list[Remedy]:
    """A key that every training engine has, in its own block."""
    return [Remedy(f"{block}.{engine}.{name}", way) for engine in ("fsdp_config", "megatron_config")]


def _cut(block: str, size: str, tokens: str, dynamic: str = "use_dynamic_bsz") -> list[Remedy]:
    """Fewer samples, or tokens, in a pass: results do not change."""
    return [
        Remedy(f"{block}.{tokens}", "halve", (f"{block}.{dynamic}", True)),
        Remedy(f"{block}.{size}", "halve", (f"{block}.{dynamic}", False)),
    ]


def _others_rest(own: str, updating: bool = False) -> list[Remedy]:
    """Moments (but its own in an update), and weights of all but the role that works, wait in host memory."""
    moments = [(block, "optimizer_offload") for block in (_ACTOR, _CRITIC) if not updating or block != own]
    weights = [(block, "param_offload") for block in (_REF, _CRITIC, _REWARD, _ACTOR, _TEACHER) if block != own]
    # Of fsdp there are no gradients between phases.
    buffers = [Remedy(f"{block}.megatron_config.grad_offload", "on") for block, _ in moments]
    return [*buffers, *(each for block, name in (*moments, *weights) for each in _of_engines(block, name, "on"))]


_UPDATE = ("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu")
_LOG_PROB = ("log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu", "log_prob_use_dynamic_bsz")
# Generation that goes on beside training keeps what it has, and may have less.
_KV_STAYS = [
    Remedy(f"{_ROLLOUT}.free_cache_engine", "on", ("trainer.mode", "sync")),
    Remedy(f"{_ROLLOUT}.gpu_memory_utilization", "lower", (f"{_ROLLOUT}.free_cache_engine", False)),
]
_ENGINE_STAYS = [*_KV_STAYS, Remedy(f"{_ROLLOUT}.free_weights", "on", ("trainer.mode", "sync"))]
_BACK = [
    each
    for part in ("param", "grad", "optimizer")
    for block in (_TEACHER, _REF, _REWARD, _CRITIC, _ACTOR)
    for each in _of_engines(block, f"{part}_offload", "off")
]
_HALF = [Remedy(f"{block}.optim.state_dtype", "bf16") for block in (_CRITIC, _ACTOR)]
_EXPORTS = [Remedy(f"{block}.checkpoint.save_contents", "hf_model") for block in (_CRITIC, _ACTOR)]
_WAITS = [Remedy(f"{block}.checkpoint.snapshot", "off") for block in (_CRITIC, _ACTOR)]
_LENGTHS = [Remedy("data.max_response_length", "halve"), Remedy("data.max_prompt_length", "halve")]


def _reading(role: str, cut: list[Remedy]) -> tuple[Remedy, ...]:
    """A pass without gradient."""
    sharing = Remedy(f"{role}.ulysses_sequence_parallel_size", "double")
    stays = _KV_STAYS if role == _REWARD else _ENGINE_STAYS  # answers are scored while more may be wanted
    return (*cut, *stays, sharing, *_more_ranks(role), *_others_rest(role), *_LENGTHS)


def _more_ranks(block: str) -> list[Remedy]:
    """A copy of a model over more ranks, on the megatron engine."""
    return [Remedy(f"{block}.megatron_config.{size}_model_parallel_size", "double") for size in ("tensor", "pipeline")]


def _update(block: str, model: str) -> tuple[Remedy, ...]:
    return (
        *_cut(block, *_UPDATE),
        Remedy(f"{model}.enable_gradient_checkpointing", "on"),
        *_ENGINE_STAYS,
        Remedy(f"{block}.fsdp_config.reshard_after_forward", "on"),
        Remedy(f"{block}.ulysses_sequence_parallel_size", "double"),
        *_more_ranks(block),
        *_others_rest(block, updating=True),
        Remedy(f"{block}.fsdp_config.grad_offload", "on"),
        Remedy(f"{block}.optim.state_dtype", "bf16"),
        *_LENGTHS,
    )


_TABLE: dict[str, tuple[Remedy, ...]] = {
    "gen": (
        Remedy(f"{_ROLLOUT}.gpu_memory_utilization", "lower"),
        Remedy(f"{_ROLLOUT}.tensor_model_parallel_size", "double"),
        *_others_rest(_ROLLOUT),
        Remedy(f"{_ROLLOUT}.max_num_seqs", "halve"),
        Remedy(f"{_ROLLOUT}.max_num_batched_tokens", "halve"),
    ),
    "old_log_prob": _reading(_ACTOR, _cut(_ROLLOUT, *_LOG_PROB)),
    "ref": _reading(_REF, _cut(_REF, *_LOG_PROB)),
    "teacher": _reading(_TEACHER, _cut(_TEACHER, *_LOG_PROB)),
    "values": _reading(_CRITIC, _cut(_CRITIC, "forward_micro_batch_size_per_gpu", "forward_max_token_len_per_gpu")),
    "reward": _reading(_REWARD, _cut(_REWARD, "micro_batch_size_per_gpu", "forward_max_token_len_per_gpu")),
    "judge": (
        Remedy(f"{_REWARD}.rollout.gpu_memory_utilization", "lower"),
        *_KV_STAYS,
        *_others_rest(_REWARD),
        Remedy(f"{_REWARD}.rollout.max_num_seqs", "halve"),
    ),
    "update_critic": _update(_CRITIC, f"{_CRITIC}.model"),
    "update_actor": _update(_ACTOR, f"{_POLICY}.model"),
    # The host's: what was moved there may come back, and a checkpoint need not hold all.
    "train": (*_WAITS, *_HALF, *_BACK),
    "save_checkpoint": (*_WAITS, *_EXPORTS, *_HALF, *_BACK),
    "sft_train": (Remedy("checkpoint.snapshot", "off"), Remedy("fsdp_config.grad_offload", "off")),
    "sft_save_checkpoint": (
        Remedy("checkpoint.snapshot", "off"),
        Remedy("checkpoint.save_contents", "hf_model"),
        Remedy("optim.state_dtype", "bf16"),
        Remedy("fsdp_config.grad_offload", "off"),
    ),
    "sft": (
        *_cut("data", "micro_batch_size_per_gpu", "max_token_len_per_gpu"),
        Remedy("model.enable_gradient_checkpointing", "on"),
        Remedy("fsdp_config.reshard_after_forward", "on"),
        Remedy("ulysses_sequence_parallel_size", "double"),
        Remedy("fsdp_config.grad_offload", "on"),
        Remedy("optim.state_dtype", "bf16"),
        Remedy("data.max_length", "halve"),
    ),
    "sft_answers": (
        Remedy("rollout.gpu_memory_utilization", "lower"),
        Remedy("optim.state_dtype", "bf16"),
        Remedy("rollout.max_num_seqs", "halve"),
        Remedy("rollout.max_num_batched_tokens", "halve"),
    ),
}
PHASES = tuple(_TABLE)
