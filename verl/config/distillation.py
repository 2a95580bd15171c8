"""`distillation.*`: teachers that say how likely they find the student's own answers, and what is learned from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from verl.config import names
from verl.config.roles import RefConfig
from verl.config.schema import Block, key


@dataclass(kw_only=True, slots=True)
class TeacherModelConfig(Block):
    model_path: str | None = key("Local folder, hub name or URL of its weights.", null="not set", path=True)
    url: list[str] | None = key(
        "Servers that have it, instead: `python -m verl.inference.server` or `vllm serve`.", null="it runs here"
    )
    num_replicas: int | None = key(
        "Copies of its weights, each sharded over ranks / num_replicas of them.", null="as fsdp_size says", min=1
    )
    key: str | None = key(  # the last one: from here on the name is this field's
        "The `data_source` (data.reward_fn_key) of the rows it is for.", null="rows that no other teacher is for"
    )


@dataclass(kw_only=True, slots=True)
class TeacherConfig(RefConfig):
    """How all local teachers run: the keys of the reference."""


@dataclass(kw_only=True, slots=True)
class DistillationLossConfig(Block):
    loss_mode: str = key(
        "The KL to the teacher: an estimate from the sampled token (+: with the KL's gradient), or over topk tokens.",
        choices=(*names.KL_LOSS_TYPES, *names.TOP_K_KLS),
    )
    topk: int = key("How many of the teacher's likeliest tokens the modes of that name take.", min=1)
    distillation_loss_coef: float = key("What it is multiplied by, in the loss or in the reward.", min=0)
    use_task_rewards: bool = key("Learn from scores, too; False: from the teachers alone, and nothing is scored.")
    as_reward: bool = key(
        "Subtract the KL from the token rewards, for the estimator to turn into advantages; False: add it to the loss."
    )

    @property
    def over_top_tokens(self) -> bool:
        """Whether the sampled tokens are not enough."""
        return self.loss_mode in names.TOP_K_KLS


@dataclass(kw_only=True, slots=True)
class DistillationConfig(Block):
    enabled: bool = key("On-policy distillation: teachers go through the student's answers.", aliases=("enable",))
    distillation_loss: DistillationLossConfig = key("What is learned from the teachers.")
    teacher_models: dict[str, TeacherModelConfig] = key(
        "The teachers by name, e.g. {math: {key: openai/gsm8k, model_path: Qwen/Qwen2.5-7B-Instruct}}."
    )
    teacher: TeacherConfig = key("How teachers run here; what is not set is as for the actor.")

    @property
    def scores_answers(self) -> bool:
        """Whether answers get task rewards."""
        return not self.enabled or self.distillation_loss.use_task_rewards

    @property
    def has_advantages(self) -> bool:
        """Whether there is any reward that an estimator makes advantages of."""
        return self.scores_answers or self.distillation_loss.as_reward

    @property
    def loss(self) -> DistillationLossConfig | None:
        """Where teachers are part of the loss."""
        return self.distillation_loss if self.enabled and not self.distillation_loss.as_reward else None

    @property
    def local_teachers(self) -> Mapping[str, TeacherModelConfig]:
        """Those that run here, by name."""
        return {name: teacher for name, teacher in self.teacher_models.items() if self.enabled and not teacher.url}

    def engine_of(self, name: str, ranks: int) -> TeacherConfig:
        """How a teacher runs on so many ranks."""
        copies = self.teacher_models[name].num_replicas
        if copies is None:
            return self.teacher
        return replace(self.teacher, fsdp_config=replace(self.teacher.fsdp_config, fsdp_size=max(1, ranks // copies)))
