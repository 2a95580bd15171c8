"""Which layouts of the megatron engine a model allows, by the numbers in its config.json, and which would fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl.config.context_length import config_of_folder
from verl.config.engine import UNEVEN, MegatronConfig
from verl.config.layout import BLOCK_OF_ROLE, layout_of
from verl.config.megatron_rules import MODEL_OF_ROLE, roles_on_megatron
from verl.config.ppo import PPOConfig
from verl.config.problems import Report
from verl.config.router_replay import KEY as REPLAY
from verl.config.schema import pick
from verl.config.wording import divisors, near_values

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Of Core: embedding and loss count as a layer each.
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_USES = ("trainer.n_gpus_per_node", "trainer.nnodes", "resource_pool_spec", "role_mapping")


@dataclass(frozen=True)
class ModelNumbers:
    """What of a model has to divide over ranks."""

    layers: int
    heads: int
    kv_heads: int
    ffn: int
    experts: int = 0
    moe_ffn: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelNumbers | None:
        """Of what a config.json holds; None where the usual names are missing."""
        text = config.get("text_config") or config
        names = ("num_hidden_layers", "num_attention_heads", "intermediate_size")
        wanted: list[Any] = [text.get(name) for name in names]
        if not all(isinstance(number, int) for number in wanted):
            return None
        layers, heads, ffn = wanted
        experts = next((text[name] for name in _EXPERTS if text.get(name)), 0)
        kv_heads = text.get("num_key_value_heads") or heads
        return cls(layers, heads, kv_heads, ffn, experts, (text.get("moe_intermediate_size") or ffn) if experts else 0)


def model_layout_rules(config: PPOConfig, report: Report, folders: Mapping[str, str] | None = None) -> None:
    """Report the sizes of every role on this engine that its model does not divide into; `folders`: where models that
    are named otherwise are here."""
    for role in roles_on_megatron(config):
        for numbers in _models(config, role, folders or {}):
            block = f"{BLOCK_OF_ROLE[role]}.megatron_config"
            Fit(block, pick(config, block), numbers, layout_of(config, role).world_size, report).check()
    mode = pick(config, REPLAY)
    if mode != "disabled" and not all(numbers.experts for numbers in _models(config, "actor", folders or {})):
        report.problem(REPLAY, mode, "the model has no experts", "Leave it out")


def _models(config: PPOConfig, role: str, folders: Mapping[str, str]) -> list[ModelNumbers]:
    """Of a role's models, as far as their config.json is here."""
    model = pick(config, MODEL_OF_ROLE.get(role, "actor_rollout_ref.model"))
    names, changes = [config.reward_model.path if role == "reward_model" else model.path], model.override_config
    if role == "teacher":
        names, changes = [teacher.model_path for teacher in config.distillation.local_teachers.values()], {}
    configs = [config_of_folder(folders.get(name, name), changes) for name in names if name]
    return [numbers for found in configs if found is not None and (numbers := ModelNumbers.of(found)) is not None]


def refuse_model_layouts(config: PPOConfig, folders: Mapping[str, str]) -> None:
    """The same when hub names and URLs are on this machine, and before any model is loaded. Raises ConfigError."""
    report = Report()
    model_layout_rules(config, report, folders)
    report.raise_if_any()


def split_evenly(layers: int, stages: int, parts: int = 1) -> tuple[int, int] | None:
    """Layers of the first and the last stage with which the others come out even, the fullest stage as small as can
    be; None where there are none."""
    between = stages - 2
    best: tuple[tuple[int, int, int], tuple[int, int]] | None = None
    for first in range(parts, layers, parts):
        for last in range(parts, layers - first + 1, parts):
            rest = layers - first - last
            if (rest == 0) != (between == 0) or (between and rest % (between * parts)):
                continue
            fullest = max(first, last, rest // between if between else 0)
            rank = (fullest, abs(first - last), last)
            if best is None or rank < best[0]:
                best = rank, (first, last)
    return None if best is None else best[1]


@dataclass(frozen=True)
class Fit:
    """One role's sizes beside its model's numbers; `check` reports those that do not divide."""

    block: str
    sizes: MegatronConfig
    model: ModelNumbers
    world: int
    report: Report

    def check(self) -> None:
        self._tensor()
        self._context()
        self._layers()
        self._experts()

    def _problem(self, key: str, value: Any, why: str, good: list[int], fix: str = "") -> None:
        """`good`: sizes that would work, `fix`: what else."""
        near = f"Set it to {near_values(good, value)}" if good else ""
        fix = " or ".join(filter(None, (near, fix))) or "No size works with the others: change those"
        self.report.problem(f"{self.block}.{key}", value, why, fix[0].upper() + fix[1:], _USES)

    def _fitting(self, others: int, works: Callable[[int], bool]) -> list[int]:
        """Sizes beside `others` ranks that divide the pool, and the model."""
        return [size for size in divisors(max(1, self.world // others)) if works(size)]

    def _tensor(self) -> None:
        model, size = self.model, self.sizes.tensor_model_parallel_size

        def uneven_parts(tp: int) -> list[str]:
            keys = 0 if tp % model.kv_heads == 0 else model.kv_heads  # ranks beyond them share one
            parts = {"attention heads": model.heads, "key heads": keys, "columns of the MLP": model.ffn}
            return [f"{number} {name}" for name, number in parts.items() if number % tp]

        uneven = uneven_parts(size)
        if uneven:
            others = self.sizes.pipeline_model_parallel_size * self.sizes.context_parallel_size
            good = self._fitting(others, lambda tp: not uneven_parts(tp))
            why = f"does not divide the model's {' and '.join(uneven)}"
            self._problem("tensor_model_parallel_size", size, why, good)

    def _context(self) -> None:
        tensor, size = self.sizes.tensor_model_parallel_size, self.sizes.context_parallel_size
        if self.model.heads % tensor or (self.model.heads // tensor) % size == 0:
            return
        heads = self.model.heads // tensor
        good = self._fitting(tensor * self.sizes.pipeline_model_parallel_size, lambda cp: heads % cp == 0)
        why = f"does not divide the {heads} attention heads of a tensor rank, which exchange tokens for heads"
        self._problem("context_parallel_size", size, why, good)

    def _layers(self) -> None:
        layers, stages = self.model.layers, self.sizes.pipeline_model_parallel_size
        parts = self.sizes.virtual_pipeline_model_parallel_size or 1
        fixed = [number for number in self.sizes.outer_stages() if isinstance(number, int)]
        ends = sum(bool(self.sizes.override_transformer_config.get(name)) for name in _COUNTED)
        rest, others = layers + ends - sum(fixed), stages - len(fixed)
        if stages == 1 or (rest == 0 and others == 0) or (others > 0 and rest > 0 and rest % (others * parts) == 0):
            return
        beside = self.sizes.tensor_model_parallel_size * self.sizes.context_parallel_size
        good = self._fitting(beside, lambda pp: pp > 1 and layers % (pp * parts) == 0)
        split = split_evenly(layers, stages, parts)
        named = "" if split is None else " and ".join(f"{n}={v}" for n, v in zip(UNEVEN, split, strict=True))
        fix = named and f"set {self.block}.override_transformer_config: {named}"
        per = f" × {parts} interleaved parts" if parts > 1 else ""
        left = f" (of the model's {layers}, {' and '.join(map(str, fixed))} placed)" if fixed else ""
        why = f"{others} stages{per} do not divide {rest} layers{left}"
        self._problem("pipeline_model_parallel_size", stages, why, good, fix)

    def _experts(self) -> None:
        model, size = self.model, self.sizes.expert_model_parallel_size
        width = self.sizes.expert_tensor_parallel_size or 1
        if not model.experts:
            if size > 1:
                self._problem("expert_model_parallel_size", size, "the model has no experts", [1])
            return
        if model.experts % size:
            good = self._fitting(width * self.sizes.pipeline_model_parallel_size, lambda ep: model.experts % ep == 0)
            self._problem("expert_model_parallel_size", size, f"does not divide {model.experts} experts", good)
        if model.moe_ffn % width:
            good = self._fitting(size * self.sizes.pipeline_model_parallel_size, lambda etp: model.moe_ffn % etp == 0)
            why = f"does not divide the {model.moe_ffn} columns of an expert"
            self._problem("expert_tensor_parallel_size", width, why, good)
        if self.sizes.tensor_model_parallel_size > 1 and not self.sizes.sequence_parallel:
            why = "a model with experts needs it beside tensor parallelism"
            self.report.problem(f"{self.block}.sequence_parallel", False, why, "Leave it out")
