"""`trainer.*`, `ray_init.*`, `retriever.*`, `sandbox.*`, `sandbox_fusion.*`: the run and the services it uses."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config import names
from verl.config.schema import Block, key


@dataclass(kw_only=True, slots=True)
class RecordConfig(Block):
    enable: bool = key("Record the run in default_local_dir/record (docs/guides/monitoring.md), for verl view.")
    max_mb_per_step: float = key(
        "Megabytes of trajectories, rows or pairs recorded per step, before compression; larger steps are sampled.",
        min=0,
    )
    max_gb: float = key(
        "Size limit in GB of the recording and those of earlier runs; beyond it, earlier runs, then steps are deleted.",
        above=0,
    )
    texts: bool = key("Record texts and token ids; False: numbers only.")
    redact: list[str] = key("Regular expressions; matches in recorded and dumped texts are replaced.", null="none")
    alert_url: str | None = key("URL to which new health alerts are posted as JSON.", null="alerts are not posted")


@dataclass(kw_only=True, slots=True)
class RunConfig(Block):
    """Keys of the run that all training programs have."""

    nnodes: int = key("Number of nodes.", min=1)
    nodes_within: float = key(
        "Seconds to wait for missing nodes at (re)start; on other nodes, for the head node.", min=0
    )
    n_gpus_per_node: int = key("GPUs (without GPUs: processes) per node.", null="all GPUs, 1 if none", min=1)
    device: str = key("Device; auto: cuda if a GPU is found, else cpu.", choices=("auto", "cuda", "cpu"))
    total_epochs: int = key("Passes over the training data.", min=1)
    total_training_steps: int | None = key("Training steps.", null="given by total_epochs", min=1, synonyms={-1: None})
    val_before_train: bool = key("Validate before the first step.")
    logger: list[str] = key("Trackers for metrics: one name or a list.", choices=names.TRACKERS)
    console: str = key(
        "Console output: one line per step, a status line and a summary; or all metrics (full).",
        choices=("line", "full"),
    )
    project_name: str = key("Project name in trackers and in the checkpoint path.")
    experiment_name: str = key("Run name in trackers and in the checkpoint path.")
    default_local_dir: str = key("Checkpoint folder.", null="./checkpoints/<project_name>/<experiment_name>", path=True)
    tracking_dir: str | None = key(
        "Folder of the trackers file and tensorboard, and of the wandb run id.",
        null="./runs/<project_name>/<experiment_name>",
        path=True,
    )
    default_hdfs_dir: str | None = key("fsspec URL or path to which checkpoints are copied.", null="no copy", path=True)
    resume_mode: str = key(
        "auto: resume from the newest complete checkpoint in default_local_dir.",
        choices=("auto", "disable", "resume_path"),
    )
    used_dir: str = key(
        "With resume_mode=disable: move checkpoints of an earlier run to before_<time>, or refuse to start.",
        choices=("move_aside", "refuse"),
    )
    resume_from_path: str | None = key("Folder global_step_N for resume_mode=resume_path.", null="not set", path=True)
    max_restarts: int = key(
        "Restarts of a failed run from its newest checkpoint; new checkpoints reset the count.", min=0
    )
    auto_memory: bool | None = key(
        "If the memory plan does not fit, apply and log the cheapest changes that make it fit.",
        null="only changes of unset keys that select where state is kept, which do not affect results",
    )
    max_nonfinite_steps: int = key(
        "Stop after this many consecutive steps without update (non-finite gradient, no scored sample).", min=1
    )

    save_within: float | None = key(
        "Seconds to save after SIGTERM or SIGUSR1: a step that takes longer is aborted and the previous one saved.",
        null="the step is always finished",
        above=0,
    )
    hang_timeout: float | None = key(
        "Seconds without progress in a phase after which the run is diagnosed as hanging and ends.",
        null="per phase: five times its recent duration, at least 300; 1800 at first",
        above=0,
    )
    record: RecordConfig = key("Recording of the run: metrics, phases, groups, trajectories, events.")


@dataclass(kw_only=True, slots=True)
class TrainerConfig(RunConfig):
    logger: list[str] = key("Trackers for metrics: one name or a list.", choices=names.TRACKERS, extendable=True)
    mode: str = key(
        "sync: generate, then train; one_step_off: train one batch behind generation; async: stream of responses.",
        choices=("sync", "one_step_off", "async"),
        synonyms={"colocate_async": "async", "separate_async": "async"},
        aliases=("v1.trainer_mode",),
    )
    max_staleness: int = key(
        "With mode=async: largest age of a response's oldest token in training steps; 0: as sync.",
        min=0,
        aliases=("v1.sampler.max_off_policy_threshold",),
    )
    staleness_strategy: str = key(
        "For responses about to exceed max_staleness: wait for them, or drop and resample (favours short ones).",
        choices=("wait", "drop"),
        aliases=("v1.sampler.max_off_policy_strategy",),
    )
    partial_rollout: bool = key(
        "With mode=async: continue unfinished responses across weight syncs; else weight syncs wait for them.",
        aliases=("../async_training.partial_rollout",),
    )
    partial_kv: str = key(
        "KV of continued responses: recompute with the new weights, keep (cheaper, inexact), or auto: keep if it fits.",
        choices=("auto", "recompute", "keep"),
    )
    overlap: bool = key(
        "On shared devices: continue generation during updates (slows them down); else pause it.",
        null="only if weight syncs wait for responses (mode=one_step_off, partial_rollout=False)",
    )
    save_freq: int = key("Steps between checkpoints; 0 or less: only the last.")
    test_freq: int = key("Steps between validations; 0 or less: only the last.", aliases=("../rollout.test_freq",))
    cls_path: str | None = key(
        "Subclass of RayPPOTrainer: file.py:Class or package.module.Class.", null="RayPPOTrainer"
    )
    critic_warmup: int = key("Steps in which only the critic is trained.", min=0)
    balance_batch: bool = key("Balance tokens over data-parallel ranks.")
    val_only: bool = key("Run validation only.")
    log_val_generations: int = key(
        "Validation responses sent to trackers.",
        null="20, of which the console shows 5",
        min=0,
        aliases=("val_generations_to_log_to_wandb",),
    )
    console_val_generations: int = key(
        "Validation responses shown on the console.", null="log_val_generations, or 5 if that is null too", min=0
    )
    max_actor_ckpt_to_keep: int | None = key("Actor checkpoints to keep.", null="keep all", min=1)
    max_critic_ckpt_to_keep: int | None = key(
        "Critic checkpoints to keep; resuming requires a step with both.", null="max_actor_ckpt_to_keep", min=1
    )
    dump_steps: list[int] = key("Steps whose batch is saved to default_local_dir/debug_step_N.pt.", null="none")
    rollout_data_dir: str | None = key("Folder for training responses as JSONL.", null="not written", path=True)
    validation_data_dir: str | None = key("Folder for validation responses as JSONL.", null="not written", path=True)
    node_rank: int | None = key(
        "Rank of this node without a running Ray cluster: 0 starts the head, others join.",
        null="use the Ray cluster",
        min=0,
    )
    master_addr: str | None = key("Address of node 0, with node_rank.", null="this machine")
    master_port: int = key("Port of node 0, with node_rank.", min=1, max=65535)


@dataclass(kw_only=True, slots=True)
class RayInitConfig(Block):
    num_cpus: int | None = key("CPUs for Ray.", null="detected", min=1, aliases=("../ray_kwargs.ray_init.num_cpus",))
    start_timeout: float | None = key(
        "Start-up timeout of Ray in seconds.", null="120, multiplied by the load average per core (1 to 10)", above=0
    )


@dataclass(kw_only=True, slots=True)
class RetrieverConfig(Block):
    url: str | None = key("URL of the search service.", null="BM25 in this run, on corpus_path")
    topk: int = key("Documents per query.", min=1)
    timeout: float = key("Timeout of a query in seconds.", above=0)
    corpus_path: str | None = key(
        'Corpus as JSONL of {"id", "contents"}, searched in the loop workers instead of url.', null="use url", path=True
    )


@dataclass(kw_only=True, slots=True)
class SandboxConfig(Block):
    require: str = key(
        "Required isolation, else no code runs: none, files, network (and files), full (namespaces and seccomp).",
        choices=names.SANDBOX_LEVELS,
    )
    warm: int = key("Pre-started interpreters per process that runs code.", min=1)
    memory_limit_mb: int = key("Memory limit of a program in MB.", min=16)
    wall_s: float = key(
        "Time limit in seconds for all tests of a response; below reward_model.reward_kwargs.timeout (10 with prime).",
        min=3,
    )


@dataclass(kw_only=True, slots=True)
class SandboxFusionConfig(Block):
    url: str | None = key(
        "SandboxFusion server for code of rewards and tools (e.g. python -m verl.sandbox.server).",
        null="the local sandbox",
    )
    max_concurrent: int = key("Concurrent requests per process.", min=1)
    memory_limit_mb: int = key("Memory limit of a program on the server in MB.", min=16)
