"""`trainer.*`, `ray_init.*`, `retriever.*`: the run itself and the machines it runs on."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config import names
from verl.config.schema import Block, key


@dataclass(kw_only=True, slots=True)
class RunConfig(Block):
    """What every training program asks about its run."""

    nnodes: int = key("Nodes.", min=1)
    nodes_within: float = key(
        "Seconds that a start waits for nodes that are not there yet (or not again), and a node for its head.", min=0
    )
    n_gpus_per_node: int = key(
        "GPUs per node; processes per node where there is no GPU.", null="GPUs found here, 1 if none", min=1
    )
    device: str = key("auto: cuda where a GPU is found, else cpu.", choices=("auto", "cuda", "cpu"))
    total_epochs: int = key("Passes over the training data.", min=1)
    total_training_steps: int | None = key(
        "Training steps after which the run ends.", null="total_epochs decide", min=1, synonyms={-1: None}
    )
    val_before_train: bool = key("Validate before the first step.")
    logger: list[str] = key("Where metrics go: one name or a list.", choices=names.LOGGERS)
    project_name: str = key("Project in trackers and in the checkpoint path.")
    experiment_name: str = key("Run in trackers and in the checkpoint path.")
    default_local_dir: str = key(
        "Where checkpoints go.", null="./checkpoints/<project_name>/<experiment_name>", path=True
    )
    tracking_dir: str | None = key(
        "Folder of the trackers file and tensorboard, and of the id of the wandb run.",
        null="./runs/<project_name>/<experiment_name>",
        path=True,
    )
    default_hdfs_dir: str | None = key("fsspec URL or path that gets a copy of them.", null="no copy", path=True)
    resume_mode: str = key(
        "auto: the newest whole checkpoint in default_local_dir.", choices=("auto", "disable", "resume_path")
    )
    used_dir: str = key(
        "With resume_mode=disable: move steps of an earlier run (and copies) into before_<time>, or refuse to start.",
        choices=("move_aside", "refuse"),
    )
    resume_from_path: str | None = key("The global_step_N folder of resume_path.", null="not set", path=True)
    max_restarts: int = key(
        "How often a run that died is started again, from its newest checkpoint; a new checkpoint sets the count back.",
        min=0,
    )
    auto_memory: bool = key(
        "Where the memory plan does not fit, make the cheapest changes that let it (each is logged with its cost)."
    )
    max_nonfinite_steps: int = key(
        "Steps in a row without an update (NaN or infinite gradient, no sample with a score) that stop the run.", min=1
    )

    save_within: float | None = key(
        "Seconds that SIGTERM or SIGUSR1 leave: a step that does not fit is given up, and the one before saved.",
        null="the step is finished first",
        above=0,
    )
    hang_timeout: float | None = key(
        "Seconds without any progress in a phase after which the run says who waits for whom, and ends.",
        null="by the phase: five times what it took lately, at least 300; 1800 before it is known",
        above=0,
    )


@dataclass(kw_only=True, slots=True)
class TrainerConfig(RunConfig):
    logger: list[str] = key("Where metrics go: one name or a list.", choices=names.LOGGERS, extendable=True)
    mode: str = key(
        "Training waits for its batch (sync), is one batch behind generation, or takes what a stream has (async).",
        choices=("sync", "one_step_off", "async"),
        synonyms={"colocate_async": "async", "separate_async": "async"},
        aliases=("v1.trainer_mode",),
    )
    max_staleness: int = key(
        "With mode=async: steps since the oldest token of an answer was sampled, at most; 0: as sync.",
        min=0,
        aliases=("v1.sampler.max_off_policy_threshold",),
    )
    staleness_strategy: str = key(
        "Answers about to be staler are waited for, or dropped and asked again (which favours short ones).",
        choices=("wait", "drop"),
        aliases=("v1.sampler.max_off_policy_strategy",),
    )
    partial_rollout: bool = key(
        "With mode=async: answers under way go on through updates of the weights; else these wait for them.",
        aliases=("../async_training.partial_rollout",),
    )
    partial_kv: str = key(
        "KV of such answers: computed again with the new weights, or kept (cheaper, and another distribution).",
        choices=("recompute", "keep"),
    )
    overlap: bool = key(
        "On devices that both use: generation goes on during updates, which it slows down; else answers stand still.",
        null="only where weights wait for the answers under way (mode=one_step_off, partial_rollout=False)",
    )
    save_freq: int = key("Steps between checkpoints; 0 or less: only the last.")
    test_freq: int = key("Steps between validations; 0 or less: only the last.", aliases=("../rollout.test_freq",))
    cls_path: str | None = key(
        "Your subclass of RayPPOTrainer: file.py:Class or package.module.Class.", null="RayPPOTrainer"
    )
    critic_warmup: int = key("Steps in which only the critic learns.", min=0)
    balance_batch: bool = key("Even out tokens over data-parallel ranks.")
    val_only: bool = key("Validate and stop.")
    log_val_generations: int = key(
        "Validation answers that every tracker gets.",
        null="20, of which a console shows 5",
        min=0,
        aliases=("val_generations_to_log_to_wandb",),
    )
    console_val_generations: int = key(
        "How many of them a console shows.", null="5, or log_val_generations where that is set", min=0
    )
    max_actor_ckpt_to_keep: int | None = key("Older actor checkpoints are deleted.", null="keep all", min=1)
    max_critic_ckpt_to_keep: int | None = key(
        "Older critic checkpoints are deleted; resuming needs a step with both.",
        null="as many as of the actor",
        min=1,
    )
    dump_steps: list[int] = key(
        "Steps whose tensors are written as debug_step_N.pt in default_local_dir (a dict for torch.load).", null="none"
    )
    rollout_data_dir: str | None = key("Folder for training answers as JSONL.", null="not written", path=True)
    validation_data_dir: str | None = key("Folder for validation answers as JSONL.", null="not written", path=True)
    node_rank: int | None = key(
        "Rank of this node when no Ray cluster runs: 0 starts the head, others join.", null="use the Ray cluster", min=0
    )
    master_addr: str | None = key("Address of node 0, with node_rank.", null="this machine")
    master_port: int = key("Port of node 0, with node_rank.", min=1, max=65535)


@dataclass(kw_only=True, slots=True)
class RayInitConfig(Block):
    num_cpus: int | None = key(
        "CPUs Ray may use.", null="detected", min=1, aliases=("../ray_kwargs.ray_init.num_cpus",)
    )
    start_timeout: float | None = key(
        "Seconds that Ray may take to start.", null="120, multiplied by the load average per core (1 to 10)", above=0
    )


@dataclass(kw_only=True, slots=True)
class RetrieverConfig(Block):
    url: str | None = key("Where the search agent asks.", null="BM25 in the run itself, on corpus_path")
    topk: int = key("Documents per question.", min=1)
    timeout: float = key("Seconds that one question may take.", above=0)
    corpus_path: str | None = key(
        'JSON lines of {"id", "contents"} that every loop worker searches itself, in the place of url.',
        null="ask url",
        path=True,
    )


@dataclass(kw_only=True, slots=True)
class SandboxConfig(Block):
    require: str = key(
        "Isolation without which no code runs: of files, of the network too, full (namespaces and seccomp), or none.",
        choices=names.SANDBOX_LEVELS,
    )
    warm: int = key("Interpreters that wait ready in each process that runs code.", min=1)
    memory_limit_mb: int = key("Memory of one program.", min=16)
    wall_s: float = key(
        "Seconds for all tests of an answer; less than reward_model.reward_kwargs.timeout (10 with prime).",
        min=3,
    )


@dataclass(kw_only=True, slots=True)
class SandboxFusionConfig(Block):
    url: str | None = key(
        "A SandboxFusion server that runs the code of rewards and tools (python -m verl.sandbox.server is one).",
        null="the local sandbox",
    )
    max_concurrent: int = key("Requests under way at once, of each process that has some.", min=1)
    memory_limit_mb: int = key("Memory of one program there.", min=16)
