"""`distillation.*`: on-policy distillation from teachers that score the student's responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from verl.config import names
from verl.config.roles import RefConfig
from verl.config.schema import Block, key


@dataclass(kw_only=True, slots=True)
class TeacherModelConfig(Block):
    model_path: str | None = key("Local folder, hub name or URL of the teacher.", null="not set", path=True)
    url: list[str] | None = key(
        "URLs of servers with the teacher (`python -m verl.inference.server`, `vllm serve`) instead of model_path.",
        null="the teacher runs in this run",
    )
    num_replicas: int | None = key(
        "Copies of its weights, each sharded over ranks / num_replicas ranks.", null="given by fsdp_size", min=1
    )
    key: str | None = key(  # last: shadows the function `key`
        "`data_source` (column data.reward_fn_key) of the rows for this teacher.",
        null="all rows without another teacher",
    )


@dataclass(kw_only=True, slots=True)
class TeacherConfig(RefConfig):
    """Engine keys of all local teachers; the same as the reference's."""


@dataclass(kw_only=True, slots=True)
class DistillationLossConfig(Block):
    loss_mode: str = key(
        "KL to the teacher: estimated from the sampled token (+: unbiased gradient), or over the topk tokens.",
        choices=(*names.KL_LOSS_TYPES, *names.TOP_K_KLS),
    )
    topk: int = key("Teacher's most likely tokens used by the topk modes.", min=1)
    distillation_loss_coef: float = key("Coefficient of the KL in the loss or reward.", min=0)
    use_task_rewards: bool = key("Also train on task rewards; False: only on the teachers, without scoring.")
    as_reward: bool = key("Subtract the KL from token rewards, before advantages; False: add it to the loss.")

    @property
    def over_top_tokens(self) -> bool:
        """Whether the loss needs the teacher's top-k tokens, not only the sampled ones."""
        return self.loss_mode in names.TOP_K_KLS


@dataclass(kw_only=True, slots=True)
class DistillationConfig(Block):
    enabled: bool = key("On-policy distillation: teachers score the student's tokens.", aliases=("enable",))
    distillation_loss: DistillationLossConfig = key("Distillation loss.")
    teacher_models: dict[str, TeacherModelConfig] = key(
        "Teachers by name, e.g. {math: {key: openai/gsm8k, model_path: Qwen/Qwen2.5-7B-Instruct}}."
    )
    teacher: TeacherConfig = key("Engine of local teachers; unset keys are taken from the actor.")

    @property
    def scores_responses(self) -> bool:
        """Whether responses get task rewards."""
        return not self.enabled or self.distillation_loss.use_task_rewards

    @property
    def has_advantages(self) -> bool:
        """Whether there are rewards from which advantages are estimated."""
        return self.scores_responses or self.distillation_loss.as_reward

    @property
    def loss(self) -> DistillationLossConfig | None:
        """The distillation loss if it is part of the training loss, else None."""
        return self.distillation_loss if self.enabled and not self.distillation_loss.as_reward else None

    @property
    def local_teachers(self) -> Mapping[str, TeacherModelConfig]:
        """Teachers that run in this run, by name."""
        return {name: teacher for name, teacher in self.teacher_models.items() if self.enabled and not teacher.url}

    def engine_of(self, name: str, ranks: int) -> TeacherConfig:
        """Return the engine keys of a teacher on this number of ranks."""
        copies = self.teacher_models[name].num_replicas
        if copies is None:
            return self.teacher
        return replace(self.teacher, fsdp_config=replace(self.teacher.fsdp_config, fsdp_size=max(1, ranks // copies)))
