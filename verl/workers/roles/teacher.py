"""TeacherWorker: log-probs of the student's responses under frozen teacher models, which share the same ranks."""

from __future__ import annotations

from dataclasses import replace

from verl.config.engine import ModelConfig
from verl.config.ppo import DistillationConfig
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.fs import resolve_model_path
from verl.workers.engine.base import TrainEngine
from verl.workers.roles.training import explain_out_of_memory, infer_columns, log_prob_micro_batching, start_engine


class TeacherWorker(Worker):
    """One rank of every local teacher; between calls, teachers are offloaded as configured."""

    def __init__(self, config: DistillationConfig, student: ModelConfig) -> None:
        """Teachers are loaded with the student's settings, except its `override_config`."""
        self.config = config
        self._model_config = replace(student, override_config={})
        self._engines: dict[str, TrainEngine] = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the teachers one after the other; with offloading, one at a time is on the device."""
        self.init_process_group()
        for name, teacher in self.config.local_teachers.items():
            path = resolve_model_path(teacher.model_path or "", f"distillation.teacher_models.{name}.model_path")
            block = self.config.engine_of(name, self.world_size)
            self._engines[name] = start_engine(self, "teacher", path, "causal_lm", self._model_config, block)
            self._engines[name].offload()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("teacher"))
    @explain_out_of_memory("teacher", config_root="distillation")
    def compute_teacher_log_prob(self, data: DataProto) -> DataProto:
        """Return `teacher_log_prob` [batch, response] under the teacher `meta_info["teacher"]`.

        For a loss over the teacher's most likely tokens also `teacher_top_ids` and `teacher_top_log_probs`
        [batch, response, K].
        """
        engine, micro = self._engines[data.meta_info["teacher"]], log_prob_micro_batching(self.config.teacher)
        loss, columns = self.config.distillation_loss, {"log_probs": "teacher_log_prob"}
        top_k = loss.topk if loss.over_top_tokens else 0
        if top_k:
            columns |= {"top_ids": "teacher_top_ids", "top_log_probs": "teacher_top_log_probs"}
        with engine.on_device(optimizer=False):
            return infer_columns(engine, data, columns, float(data.meta_info["temperature"]), micro, top_k)
