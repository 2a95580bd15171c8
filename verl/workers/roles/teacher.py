"""TeacherWorker: frozen models that say how likely they find the student's answers, one at a time on the same ranks."""

from __future__ import annotations

from dataclasses import replace

from verl.config.distillation import DistillationConfig
from verl.config.engine import ModelConfig
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.fs import resolve_model_path
from verl.workers.engine.base import MicroBatching, TrainEngine
from verl.workers.roles.memory import phase_memory
from verl.workers.roles.training import inferred, start_engine


class TeacherWorker(Worker):
    """One rank of every local teacher; those that do not work are parked."""

    def __init__(self, config: DistillationConfig, student: ModelConfig) -> None:
        """Teachers are loaded as the student is, but for what overrides its own configuration."""
        self.config = config
        self._like = replace(student, override_config={})
        self._engines: dict[str, TrainEngine] = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load them one after the other: on the device there is one at a time where they are offloaded."""
        self.init_process_group()
        for name, teacher in self.config.local_teachers.items():
            path = resolve_model_path(teacher.model_path or "", f"distillation.teacher_models.{name}.model_path")
            block = self.config.engine_of(name, self.world_size)
            self._engines[name] = start_engine(self, "teacher", path, "causal_lm", self._like, block)
            self._engines[name].park()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("teacher"))
    @phase_memory("teacher", at="distillation")
    def compute_teacher_log_prob(self, data: DataProto) -> DataProto:
        """`teacher_log_prob`: [batch, response], under the teacher that `meta_info["teacher"]` names; for a loss over
        its likeliest tokens also `teacher_top_ids` and `teacher_top_log_probs` [batch, response, K]."""
        block, engine = self.config.teacher, self._engines[data.meta_info["teacher"]]
        micro = MicroBatching.by(
            block.log_prob_use_dynamic_bsz,
            block.log_prob_micro_batch_size_per_gpu,
            block.log_prob_max_token_len_per_gpu,
        )
        loss, columns = self.config.distillation_loss, {"log_probs": "teacher_log_prob"}
        top_k = loss.topk if loss.over_top_tokens else 0
        if top_k:
            columns |= {"top_ids": "teacher_top_ids", "top_log_probs": "teacher_top_log_probs"}
        with engine.awake(optimizer=False):
            return inferred(engine, data, columns, float(data.meta_info["temperature"]), micro, top_k)
