"""SupervisedTrainer: the training loop of SFT and reward models."""

from __future__ import annotations

import copy
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

from verl.config import SupervisedConfig, SupervisedDataConfig
from verl.config.supervised import check_context_length
from verl.protocol import DataProto
from verl.trainer.common.checkpoint import Saver, load_step
from verl.trainer.common.dumps import dump_batch
from verl.trainer.common.loader import BatchLoader
from verl.trainer.common.recorder import KEY, Recorder
from verl.trainer.common.run_start import RunStart, run_parts
from verl.trainer.common.run_status import Phases, RunStatus
from verl.trainer.common.run_summary import RunSummary
from verl.trainer.common.status_display import show_status
from verl.trainer.common.training_health import NonFiniteError, add_memory_advice
from verl.trainer.recovery.hang_detector import HangDetector, raise_in_main_thread
from verl.trainer.recovery.ray_monitor import RayLostError
from verl.trainer.recovery.signals import StopSignal
from verl.trainer.recovery.step_end import FOLDER, VALIDATION, NonFatalFailures, Preemption, StepEnd, is_due
from verl.trainer.supervised.launch import Ranks
from verl.trainer.supervised.row_record import RowRecord, ValidationRecord
from verl.utils import hf_tokenizer
from verl.utils.balancing import get_seqlen_balanced_partitions
from verl.utils.console import LINE
from verl.utils.dataset.rl_dataset import EpochSampler
from verl.utils.fs import resolve_model_path
from verl.utils.import_utils import load_user_object
from verl.utils.metric import reduce_metrics
from verl.utils.tracking import Tracking
from verl.workers.roles.supervised import RECORDS_ROWS

logger = logging.getLogger(__name__)


Config = TypeVar("Config", bound=SupervisedConfig)


class SupervisedTrainer(Generic[Config]):
    """The constructor reads the data; `start()` starts the ranks and loads the model; `fit()` trains; `close()` ends
    the ranks.

    A subclass defines `program`, `worker_class` (`CheckpointedWorker` with `init_model`, `train_batch`, `evaluate`),
    `create_dataset`, `collate_fn` and `batch_metrics`. It may override `record_rows`, `record_validation`,
    `balance_ranks` and `validation_metrics`.
    """

    worker_class: ClassVar[type]
    program: ClassVar[str]
    """Name of the program in the recording."""
    row_name: ClassVar[str] = "rows"
    """Unit of `data.train_batch_size`, for messages."""

    def __init__(self, config: Config) -> None:
        self.config = config = copy.deepcopy(config)
        trainer, model = config.trainer, config.model
        folder = resolve_model_path(model.path)
        check_context_length(config, folder)
        self.run_start = RunStart(trainer, run_parts(config))
        self.tokenizer = hf_tokenizer(folder, trust_remote_code=model.trust_remote_code)
        chat_template = config.data.apply_chat_template_kwargs.get("chat_template")
        if chat_template and not isinstance(self.tokenizer.chat_template, dict):  # a dict maps names to templates
            self.tokenizer.chat_template = chat_template  # saved with the model, to be used in generation
        self.train_dataloader, self.val_dataloader = self._create_dataloaders()
        self.steps_per_epoch = len(self.train_dataloader)
        self.total_training_steps = trainer.total_training_steps or self.steps_per_epoch * trainer.total_epochs
        if config.optim.total_training_steps is None:
            config.optim.total_training_steps = self.total_training_steps
        self.global_steps = 0
        self.stop_requested = threading.Event()
        self.failures = NonFatalFailures()
        self.saver = Saver(config, trainer.max_ckpt_to_keep, self.tokenizer, lambda: self.run_start)
        self._step_end = StepEnd(self.stop_requested, self.failures, self.saver, Preemption(trainer.save_within))
        self.summary = RunSummary()
        self._skipped_in_a_row = 0
        self._ranks: Ranks | None = None
        self.status = RunStatus(self.total_training_steps)
        self.status.starting = True
        self.recorder = Recorder(trainer, self.program, self.status)
        self.row_record: RowRecord | None = None
        """Records rows of training batches, if the run is recorded."""
        self.saver.on_end = self.recorder.saved
        self.hang_detector = HangDetector(self.status, trainer.hang_timeout, raise_in_main_thread())

    def start(self) -> None:
        """Start the ranks and load the model."""
        with self.hang_detector:
            self._ranks = Ranks(self.config, self.worker_class)
            self.worker_group = self._ranks.group
            self.worker_group.init_model()

    def close(self, error: BaseException | None = None) -> None:
        """Wait for the save in progress, end ranks and data workers, and release the folder; safe to call twice.

        `error`: the exception that ends the run, if any (see `Saver.close`).
        """
        self.saver.close(error)
        self.train_dataloader.close()
        self.run_start.close()
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def __enter__(self) -> SupervisedTrainer[Config]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RayLostError) or (isinstance(error, StopSignal) and self.config.ranks > 1):
            self._ranks = None  # their processes were killed; closing them would wait for Ray
        self.close(error)

    # ---------------------------------------------------------------- overridden by subclasses

    def create_dataset(self, is_train: bool) -> Any:
        """Return the dataset of `data.train_files` or `data.val_files`. `self.tokenizer` is set."""
        raise NotImplementedError

    def collate_fn(self) -> Callable[[Sequence[Any]], Mapping[str, torch.Tensor]]:
        """Return a picklable function that collates rows of the dataset to the columns of a batch."""
        raise NotImplementedError

    def batch_metrics(self, batch: DataProto) -> dict[str, float]:
        """Return metrics of a training batch that do not depend on the model."""
        raise NotImplementedError

    def record_rows(self, batch: DataProto, output: DataProto) -> None:
        """Record the rows of a trained batch, if the program has such rows. `output`: the result of `train_batch`."""

    def record_validation(self, record: ValidationRecord, batch: DataProto, result: DataProto) -> None:
        """Add the rows of a batch to the record of a validation. `result`: the result of `evaluate`."""

    def balance_ranks(self, batch: DataProto) -> DataProto:
        """Reorder the rows so that every data-parallel rank gets equally many rows and about equally many tokens."""
        lengths = batch.batch["attention_mask"].sum(dim=1).tolist()
        parts = get_seqlen_balanced_partitions(lengths, self.config.dp_size, equal_size=True)
        return batch.select_idxs(torch.tensor([row for part in parts for row in part]))

    def validation_metrics(self, results: Sequence[DataProto]) -> dict[str, float]:
        """Return the metrics of a validation. `results`: results of `evaluate`, one per batch."""
        joined: dict[str, list[Any]] = {}
        for result in results:
            for name, values in result.meta_info["metrics"].items():
                joined.setdefault(name, []).extend(values)
        return reduce_metrics(joined)

    @property
    def validates(self) -> bool:
        """Whether the run has validation data."""
        return self.val_dataloader is not None

    def _create_dataloaders(self) -> tuple[BatchLoader, DataLoader | None]:
        data, collate = self.config.data, self.collate_fn()
        train = train_loader(self.create_dataset(is_train=True), data, collate, self.row_name)
        return train, val_loader(self.create_dataset(is_train=False), data, collate) if data.val_files else None

    # ---------------------------------------------------------------- the loop

    def fit(self) -> None:
        """Train all steps. If a stop is requested, finish the current step, save and return."""
        trainer = self.config.trainer
        names, first = (trainer.project_name, trainer.experiment_name), self.run_start.first_step
        tracking = Tracking(
            *names,
            trainer.logger,
            self.config.to_dict(),
            first,
            trainer.tracking_dir,
            trainer.console,
            self.total_training_steps,
        )
        with self.hang_detector, tracking as self.tracking, add_memory_advice(self.config), self._recording():
            self._load_checkpoint()
            self.status.step = self.global_steps
            with show_status(self.status.snapshot, trainer.console):
                if trainer.val_before_train and self.validates:
                    metrics = self.failures.attempt(VALIDATION, self.global_steps, self._validate)
                    self._log(metrics or self.failures.metrics(), self.global_steps)
                self._train()
        if trainer.console == LINE:
            logger.info("%s", self.summary.render())

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Record the run in the block."""
        self.failures.dump(KEY, str(self.recorder.folder), self.run_start.step, self._open_record)
        try:
            yield
        finally:
            self.recorder.close(self.global_steps, sys.exc_info()[1])

    def _open_record(self) -> None:
        start, groups = self.run_start, {self.program: self.worker_group}
        if self.recorder.settings.enable:
            # A tokenizer cannot be used by two threads at the same time.
            tokenizer = copy.deepcopy(self.tokenizer)
            config = self.config.to_dict()
            self.recorder.open(start.first_step, config, lambda: groups, start.resume_from, tokenizer)
            self.row_record = RowRecord(self.recorder, tokenizer)

    def _log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Send the metrics of a step to the trackers, record them and add them to the summary."""
        self.summary.add(step, metrics, time.monotonic())
        self.tracking.log(metrics, step)
        self.recorder.log(metrics, step)

    def _train(self) -> None:
        self.status.starting = False
        if self.global_steps >= self.total_training_steps:
            logger.info("nothing left to train: step %d of %d", self.global_steps, self.total_training_steps)
        while self.global_steps < self.total_training_steps:
            for rows in self.train_dataloader:
                self.global_steps += 1
                stopping = self._step(DataProto.from_dict(rows))
                if stopping or self.global_steps >= self.total_training_steps:
                    return

    def _step(self, batch: DataProto) -> bool:
        """Train one step, then save and validate if due, and log; return whether the run stops now."""
        trainer, step = self.config.trainer, self.global_steps
        phases = Phases(self.status)
        with phases("step", self.worker_group):
            metrics = self._train_step(batch)
        end_metrics, stopping = self._step_end(
            step,
            self._save_checkpoint,
            self._validate,
            phases,
            self.worker_group,
            save_due=self._is_due(trainer.save_freq),
            test_due=self.validates and self._is_due(trainer.test_freq),
            is_last=step >= self.total_training_steps,
        )
        seconds, tokens = phases.seconds["step"], float(batch.batch["attention_mask"].sum())
        metrics |= {
            "training/global_step": step,
            "training/epoch": (step - 1) // self.steps_per_epoch,
            "perf/total_num_tokens": tokens,
            "perf/time_per_step": seconds,
            "perf/tokens_per_second": tokens / seconds,
            "perf/computed_tokens_per_second": tokens * (1 - metrics.get("train/prefix_saving", 0.0)) / seconds,
            "perf/throughput": tokens / seconds / self.config.ranks,
        }
        metrics |= self.batch_metrics(batch)
        metrics |= {f"timing_s/{name}": value for name, value in phases.seconds.items()} | end_metrics
        metrics |= self.hang_detector.step_done(seconds)
        metrics |= self.recorder.end_step(step, self.failures)
        self._log(metrics, step)
        self.status.step_done()
        self._check_finite(batch, metrics)
        if stopping or step >= self.total_training_steps:
            self.failures.raise_if_unsaved(step)
        return stopping

    def _train_step(self, batch: DataProto) -> dict[str, float]:
        """Take one optimizer step and return its metrics."""
        if self.config.dp_size > 1:
            batch = self.balance_ranks(batch)
        batch.meta_info[RECORDS_ROWS] = self.row_record is not None
        output = self.worker_group.train_batch(batch)
        self.record_rows(batch, output)
        return reduce_metrics(output.meta_info["metrics"])

    def _validate(self) -> dict[str, float]:
        results = []
        record = ValidationRecord(self.row_record.options) if self.row_record is not None else None
        for rows in self.val_dataloader or ():
            if self.stop_requested.is_set() and self.config.trainer.save_within is not None:
                logger.warning("validation given up: there may be no time for it (trainer.save_within)")
                return {}
            batch = DataProto.from_dict(rows, meta_info={RECORDS_ROWS: record is not None}, auto_padding=True)
            results.append(self.worker_group.evaluate(batch))
            if record is not None:
                self.record_validation(record, batch, results[-1])
        if record is not None:
            record.submit(self.recorder, self.global_steps)
        return self.validation_metrics(results)

    def _save_checkpoint(self) -> None:
        """Begin to save the state after `global_steps` steps; its `huggingface/` can be used as `model.path`."""
        state = {"global_steps": self.global_steps, "dataloader": self.train_dataloader.state_dict()}
        exports = "hf_model" in self.config.checkpoint.save_contents
        self.saver.begin(state, {".": self.worker_group}, ["huggingface"] if exports else [])

    def _load_checkpoint(self) -> None:
        """Resume from the configured or newest complete checkpoint, if there is one."""

        def read(folder: Path, state: Mapping[str, Any]) -> None:
            self.global_steps = int(state["global_steps"])
            self.train_dataloader.load_state_dict(state["dataloader"])
            self.worker_group.load_checkpoint(str(folder))

        load_step(self.run_start.resume_from, read)
        self.saver.newest_step = self.global_steps if self.run_start.resume_from is not None else None

    def _is_due(self, freq: int | None) -> bool:
        every = self.steps_per_epoch if freq is None else freq
        return is_due(self.global_steps, every, self.total_training_steps)

    def _check_finite(self, batch: DataProto, metrics: dict[str, float]) -> None:
        """Dump the batch of a skipped update (gradient not finite, or far too large); raise after too many in a row."""
        trainer = self.config.trainer
        if not metrics["train/skipped_steps"]:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        folder, step = trainer.default_local_dir, self.global_steps
        file = self.failures.dump(FOLDER, folder, step, lambda: dump_batch(batch, folder, step))
        logger.warning(
            "gradient not finite, or optim.lr far too large: update skipped, weights unchanged, batch %s",
            f"dumped to {file}" if file else "not dumped",
        )
        if self._skipped_in_a_row >= trainer.max_nonfinite_steps:
            raise NonFiniteError(
                f"the gradient was not finite in {self._skipped_in_a_row} training steps in a row "
                "(trainer.max_nonfinite_steps). None of these updates changed the weights. Lower optim.lr, then "
                "optim.grad_clip; look at the dumped batches, and at the weights in model.path."
            )


def custom_dataset(config: SupervisedDataConfig, tokenizer: Any, files: Sequence[str], limit: int) -> Any:
    """Return the dataset of `data.custom_cls` with up to `limit` rows of the files; None if no class is set."""
    custom = config.custom_cls
    if custom.path is None or custom.name is None:
        return None
    parameters = ("data_files", "tokenizer", "config", "max_samples")
    cls = load_user_object(custom.path, custom.name, key="data.custom_cls.path", required_params=parameters)
    return cls(data_files=files, tokenizer=tokenizer, config=config, max_samples=limit)


def train_loader(
    dataset: Any, config: SupervisedDataConfig, collate_fn: Callable[..., Any], row_name: str = "rows"
) -> BatchLoader:
    """Return a loader of full batches, shuffled by `data.seed`, whose position can be saved and restored.

    `row_name`: unit of the dataset's length, for an error message.
    """
    if len(dataset) < config.train_batch_size:
        raise ValueError(
            f"data.train_batch_size = {config.train_batch_size}: data.train_files have only {len(dataset)} {row_name}. "
            f"Set it to {len(dataset)} or less, or use more data."
        )
    sampler = EpochSampler(dataset, config.seed, config.shuffle, config.train_batch_size)
    return BatchLoader(
        dataset,
        sampler,
        batch_size=config.train_batch_size,
        drop_last=True,
        num_workers=config.dataloader_num_workers,
        collate_fn=collate_fn,
    )


def val_loader(dataset: Any, config: SupervisedDataConfig, collate_fn: Callable[..., Any]) -> DataLoader:
    """Return a loader of all rows in the order of the files."""
    return DataLoader(
        dataset, batch_size=config.val_batch_size, num_workers=config.dataloader_num_workers, collate_fn=collate_fn
    )
