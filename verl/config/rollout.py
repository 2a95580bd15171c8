"""`actor_rollout_ref.rollout.*`: how answers are generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config import names
from verl.config.schema import Block, key

_ACTOR = "actor_rollout_ref.actor"


@dataclass(kw_only=True, slots=True)
class ValKwargsConfig(Block):
    n: int = key("Answers per validation prompt.", min=1)
    do_sample: bool = key("Sample; False: greedy.", null="temperature > 0")
    temperature: float = key("Temperature in validation.", min=0)
    top_p: float = key("Nucleus in validation.", above=0, max=1)
    top_k: int = key("Tokens considered in validation; -1: all.", min=-1)
    max_new_tokens: int = key(
        "Longest answer in validation.", null="", follows="actor_rollout_ref.rollout.max_new_tokens", min=1
    )


@dataclass(kw_only=True, slots=True)
class MultiTurnConfig(Block):
    enable: bool = key("Several turns with tools or an environment.")
    max_assistant_turns: int | None = key("Turns that the model may take.", null="no limit", min=1)
    max_user_turns: int | None = key("Turns that tools or the environment may take.", null="no limit", min=1)
    tool_config_path: str | None = key("YAML that lists the tools.", null="no tools", path=True)
    function_tool_path: str | None = key(
        "Python file whose functions marked @function_tool are tools.", null="none", path=True
    )
    interaction_config_path: str | None = key("YAML that lists the simulated users.", null="none", path=True)
    format: str = key(
        "How the model writes a tool call.", choices=names.TOOL_FORMATS, synonyms=names.TOOL_FORMAT_SYNONYMS
    )
    max_parallel_calls: int = key("Tool calls of one turn that are run; the model is told of the rest.", min=1)
    max_tool_calls: int | None = key("Tool calls of one trajectory that are run.", null="no limit", min=1)
    tool_timeout: float = key("Seconds after which a tool call is given up.", above=0)
    max_tool_response_length: int = key("Characters of a tool's answer that the model sees.", min=1)
    tool_response_truncate_side: str = key(
        "Of a longer one, left keeps the beginning, right the end, middle both.", choices=("left", "middle", "right")
    )
    tokenization_sanity_check_mode: str = key(
        "How closely tokens appended turn by turn must match the template of the whole chat; checked at start.",
        choices=("strict", "ignore_strippable", "disable"),
    )


@dataclass(kw_only=True, slots=True)
class AgentConfig(Block):
    num_workers: int = key("Processes that run the agents' turns.", min=1)
    max_concurrent_requests: int = key(
        "Conversations that each of them runs concurrently; rows of single_turn_agent are not limited.",
        null="2 × replicas × max_num_seqs / num_workers, at least 128",
        min=1,
    )
    default_agent_loop: str = key(
        "Loop of rows without agent_name: a name, pkg.module.Class or file.py:Class.",
        null="single_turn_agent; tool_agent with multi_turn.enable, search_agent with do_search",
    )
    agent_loop_config_path: str | None = key(
        "YAML list of {name, _target_, …constructor keywords}: loops by name.", null="none", path=True
    )
    agent_loop_manager_class: str | None = key(
        "Class of those processes: pkg.module.Class, a subclass of verl.agent.worker.AgentLoopWorker.",
        null="AgentLoopWorker",
    )


@dataclass(kw_only=True, slots=True)
class CheckpointEngineConfig(Block):
    update_weights_bucket_megabytes: int = key("Weights that travel to the engine at a time.", min=1)


@dataclass(kw_only=True, slots=True)
class PrometheusConfig(Block):
    enable: bool = key("Every replica serves /metrics.")
    port: int = key("Port of the first replica; that of each further one is one higher.", min=1, max=65535)


@dataclass(kw_only=True, slots=True)
class GeneratorConfig(Block):
    """How answers are generated, whether a training follows or not."""

    name: str = key("Engine: native is ours and needs no install.", choices=names.ROLLOUTS)
    temperature: float = key("Sampling temperature; 0: greedy.", min=0)
    top_p: float = key("Nucleus: smallest set of tokens with this probability.", above=0, max=1)
    top_k: int = key("Tokens considered; -1: all.", min=-1)
    min_p: float = key("Drop tokens less likely than this share of the likeliest.", min=0, max=1)
    do_sample: bool = key("Sample; False: greedy.")
    seed: int = key("Seed of the sampling noise.", min=0)
    max_new_tokens: int = key("Longest answer in tokens.", min=1, aliases=("response_length",))
    stop: list[str] = key("Strings that end an answer.", null="none")
    stop_token_ids: list[int] = key("Token ids that end an answer, besides the model's own end tokens.", null="none")
    ignore_eos: bool = key("Go on after the model's own end tokens (benchmarks).")
    tensor_model_parallel_size: int = key("Ranks one copy of the engine runs on.", min=1)
    gpu_memory_utilization: float = key("Share of device memory the engine may take.", above=0, max=1)
    dtype: str = key(
        "Precision of the engine's weights.",
        choices=("auto", "bfloat16", "float16", "float32"),
        synonyms={"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"},
    )
    enforce_eager: bool = key("No CUDA graphs.")
    max_num_seqs: int = key("Most sequences decoded at once.", min=1)
    max_num_batched_tokens: int = key("Most tokens in one engine step.", min=1)
    max_model_len: int = key("Longest sequence.", null="max_prompt_length + the longest answer", min=1)
    enable_chunked_prefill: bool = key("Mix pieces of long prompts with decoding.")
    enable_prefix_caching: bool = key("Reuse the KV of equal prefixes.")
    expert_parallel_size: int = key(
        "Ranks over which the experts of a mixture are spread: 1, or tensor_model_parallel_size; vllm and sglang.",
        min=1,
    )
    quantization: str | None = key(
        "Precision of the engine's weights as it computes with them; vllm and sglang.", null="dtype", choices=("fp8",)
    )
    cudagraph_capture_sizes: list[int] | None = key(
        "Batch sizes whose steps are recorded as CUDA graphs; vllm, sglang and trtllm.", null="the engine's own", min=1
    )
    in_process: bool = key(
        "vllm and trtllm run in the worker's process, at tensor_model_parallel_size 1; False: in one beside it."
    )
    server_urls: list[str] = key(
        "Engines of that name that run already, by URL: http://host:8000; they are joined, and none is started.",
        null="none",
    )
    engine_kwargs: dict[str, Any] = key("Arguments for the engine itself, by engine name.")


@dataclass(kw_only=True, slots=True)
class RolloutConfig(GeneratorConfig):
    temperature: float = key("Sampling temperature; log-probs in training use the same one.", min=1e-5, max=1e5)
    seed: int = key("Seed of the sampling noise.", null="", follows="data.seed", min=0)
    max_new_tokens: int = key(
        "Longest answer in tokens.", null="", follows="data.max_response_length", min=1, aliases=("response_length",)
    )
    mode: str = key("async lets every sample proceed on its own (needed for tools).", choices=("sync", "async"))
    n: int = key(
        "Answers per prompt.", null="1, and 4 for estimators that compare answers", min=1, aliases=("n_agent",)
    )
    load_format: str = key("Where the engine's first weights come from (engine's own name; dummy: from the trainer).")
    free_cache_engine: bool = key("Release the KV memory while training.")
    free_weights: bool = key(
        "Let go of the engine's weights while training, without a copy; the next hand-over brings them.",
        null="free_cache_engine where training and generation share devices, else False",
    )
    return_routed_experts: bool = key(
        "The engine says which experts each token went through (native, vllm): column routed_experts.",
        null="true where the actor replays them (router_replay.mode R3)",
    )
    nnodes: int = key(
        "Nodes of a pool of the engine's own; 0: it shares the trainer's devices.",
        min=0,
        aliases=("../../rollout.nnodes",),
    )
    n_gpus_per_node: int = key(
        "Devices of each of those.",
        null="",
        follows="trainer.n_gpus_per_node",
        min=1,
        aliases=("../../rollout.n_gpus_per_node",),
    )
    checkpoint_engine: CheckpointEngineConfig = key("The hand-over of weights.")
    prometheus: PrometheusConfig = key("What the engine counts, for a Prometheus server.")
    log_prob_micro_batch_size_per_gpu: int = key(
        "Samples per rank and forward pass when old log-probs are computed.",
        null="",
        follows=f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
        min=1,
    )
    log_prob_micro_batch_size: int | None = key(
        "The same, counted over all ranks; folded into log_prob_micro_batch_size_per_gpu.", null="not used", min=1
    )
    log_prob_use_dynamic_bsz: bool = key(
        "Fill those micro-batches up to a token budget.", null="", follows=f"{_ACTOR}.use_dynamic_bsz"
    )
    log_prob_max_token_len_per_gpu: int = key(
        "That budget: tokens per rank and forward pass.",
        null="",
        follows=f"{_ACTOR}.ppo_max_token_len_per_gpu",
        min=1,
    )
    val_kwargs: ValKwargsConfig = key("Sampling in validation.")
    multi_turn: MultiTurnConfig = key("Turns and tools.")
    agent: AgentConfig = key("Processes that run agents.")
