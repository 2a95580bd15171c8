"""`actor_rollout_ref.rollout.*`: engine, sampling, agents."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from verl.config import names
from verl.config.engine import ModelConfig
from verl.config.schema import Block, key

_ACTOR = "actor_rollout_ref.actor"
_MODEL_KINDS = ("auto", "fused", "generic")


@dataclass(kw_only=True, slots=True)
class ValKwargsConfig(Block):
    n: int = key("Responses per validation prompt.", min=1)
    do_sample: bool = key("Sample; False: greedy.", null="temperature > 0")
    temperature: float = key("Temperature in validation.", min=0)
    top_p: float = key("Nucleus sampling (top-p) in validation.", above=0, max=1)
    top_k: int = key("Top-k in validation; -1: off.", min=-1)
    max_new_tokens: int = key(
        "Largest response length in validation, in tokens.", follows="actor_rollout_ref.rollout.max_new_tokens", min=1
    )


@dataclass(kw_only=True, slots=True)
class MultiTurnConfig(Block):
    enable: bool = key("Run several turns with tools or an environment.")
    max_assistant_turns: int | None = key("Largest number of model turns.", null="no limit", min=1)
    max_user_turns: int | None = key("Largest number of tool or environment turns.", null="no limit", min=1)
    tool_config_path: str | None = key("YAML file with the tools.", null="no tools", path=True)
    function_tool_path: str | None = key(
        "Python file; functions decorated with @function_tool become tools.", null="none", path=True
    )
    interaction_config_path: str | None = key("YAML file of interactions (simulated users).", null="none", path=True)
    format: str = key(
        "Format in which the model writes tool calls.", choices=names.TOOL_FORMATS, synonyms=names.TOOL_FORMAT_SYNONYMS
    )
    max_parallel_calls: int = key("Tool calls run per turn; further calls get an error message.", min=1)
    max_tool_calls: int | None = key("Largest number of tool calls run per trajectory.", null="no limit", min=1)
    tool_timeout: float = key("Timeout of a tool call in seconds.", above=0)
    max_tool_response_length: int = key("Largest length of a tool response in characters.", min=1)
    tool_response_truncate_side: str = key(
        "Truncation of longer tool responses: left keeps the beginning, right the end, middle both.",
        choices=("left", "middle", "right"),
    )
    tokenization_sanity_check_mode: str = key(
        "Start-up check: tokens appended turn by turn must match the chat template applied to the whole conversation.",
        choices=("strict", "ignore_strippable", "disable"),
    )


@dataclass(kw_only=True, slots=True)
class AgentConfig(Block):
    num_workers: int = key("Agent loop worker processes.", min=1)
    max_concurrent_requests: int = key(
        "Concurrent conversations per worker; rows of single_turn_agent are not limited.",
        null="2 × replicas × max_num_seqs / num_workers, at least 128",
        min=1,
    )
    default_agent_loop: str = key(
        "Agent loop of rows without agent_name: a name, pkg.module.Class or file.py:Class.",
        null="single_turn_agent; tool_agent with multi_turn.enable, search_agent with do_search",
    )
    agent_loop_config_path: str | None = key(
        "YAML list of {name, _target_, constructor arguments …} that registers agent loops.", null="none", path=True
    )
    agent_loop_manager_class: str | None = key(
        "Worker class: pkg.module.Class, a subclass of verl.agent.worker.AgentLoopWorker.", null="AgentLoopWorker"
    )


@dataclass(kw_only=True, slots=True)
class CheckpointEngineConfig(Block):
    update_weights_bucket_megabytes: int = key("Size of a weight sync bucket in MB.", min=1)


@dataclass(kw_only=True, slots=True)
class PrometheusConfig(Block):
    enable: bool = key("Serve /metrics on every replica.")
    port: int = key("Port of the first replica; further replicas use the following ports.", min=1, max=65535)


@dataclass(kw_only=True, slots=True)
class GeneratorConfig(Block):
    """Engine and sampling keys, shared by training and generation."""

    name: str = key("Rollout engine; native is built in.", choices=names.ROLLOUTS, extendable=True)
    temperature: float = key("Sampling temperature; 0: greedy.", min=0)
    top_p: float = key("Nucleus sampling (top-p).", above=0, max=1)
    top_k: int = key("Top-k; -1: off.", min=-1)
    min_p: float = key("Drop tokens whose probability is below this fraction of the largest one.", min=0, max=1)
    do_sample: bool = key("Sample; False: greedy.")
    seed: int = key("Seed of sampling.", min=0)
    max_new_tokens: int = key("Largest response length in tokens.", min=1, aliases=("response_length",))
    stop: list[str] = key("Strings that end a response.", null="none")
    stop_token_ids: list[int] = key("Token ids that end a response, besides the model's end tokens.", null="none")
    ignore_eos: bool = key("Continue after the model's end tokens (for benchmarks).")
    tensor_model_parallel_size: int = key("Tensor parallel size of a replica.", min=1)
    gpu_memory_utilization: float = key("Fraction of device memory for the engine.", above=0, max=1)
    dtype: str = key(
        "Precision of the engine's weights.",
        choices=("auto", "bfloat16", "float16", "float32"),
        synonyms={"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"},
    )
    enforce_eager: bool = key("Disable CUDA graphs.")
    max_num_seqs: int = key("Largest number of sequences decoded concurrently.", min=1)
    max_num_batched_tokens: int = key("Largest number of tokens in an engine step.", min=1)
    max_model_len: int = key("Largest sequence length.", null="max_prompt_length + largest max_new_tokens", min=1)
    enable_chunked_prefill: bool = key("Split long prompts into chunks that run together with decoding.")
    enable_prefix_caching: bool = key("Reuse the KV cache of common prefixes.")
    expert_parallel_size: int = key("Expert parallel size: 1 or tensor_model_parallel_size; vllm and sglang.", min=1)
    quantization: str | None = key("Weight quantization; vllm and sglang.", null="none", choices=("fp8",))
    cudagraph_capture_sizes: list[int] | None = key(
        "Batch sizes captured as CUDA graphs; vllm, sglang and trtllm.", null="the engine's default", min=1
    )
    in_process: bool = key("Run vllm or trtllm (tensor_model_parallel_size 1) in the worker process.")
    server_urls: list[str] = key(
        "URLs (http://host:8000) of running engines of this type to use instead of starting engines.", null="none"
    )
    engine_kwargs: dict[str, Any] = key("Constructor arguments of the engine, by engine name.")


@dataclass(kw_only=True, slots=True)
class RolloutConfig(GeneratorConfig):
    temperature: float = key("Sampling temperature, also used for log-probs in training.", min=1e-5, max=1e5)
    seed: int = key("Seed of sampling.", follows="data.seed", min=0)
    max_new_tokens: int = key(
        "Largest response length in tokens.", follows="data.max_response_length", min=1, aliases=("response_length",)
    )
    max_num_seqs: int = key(
        "Largest number of sequences decoded concurrently.",
        null="1024; without validation and agents: the largest number of responses in flight per replica",
        min=1,
    )
    mode: str = key("async: each trajectory proceeds independently (required for tools).", choices=("sync", "async"))
    n: int = key(
        "Responses per prompt.", null="4 if the estimator compares responses, else 1", min=1, aliases=("n_agent",)
    )
    load_format: str = key("Source of initial engine weights: dummy (from the trainer) or a load format of the engine.")
    free_cache_engine: bool = key("Release the KV cache memory during training.")
    free_weights: bool = key(
        "Release the engine's weights during training; the next weight sync restores them.",
        null="free_cache_engine if training and generation share devices; False if only LoRA adapters are sent",
    )
    return_routed_experts: bool = key(
        "Return the experts of each token in the column routed_experts (native, vllm).",
        null="true with router_replay.mode=R3",
    )
    nnodes: int = key(
        "Nodes of a separate pool for rollout; 0: share the trainer's devices.",
        min=0,
        aliases=("../../rollout.nnodes",),
    )
    n_gpus_per_node: int = key(
        "Devices per node of the separate rollout pool.",
        follows="trainer.n_gpus_per_node",
        min=1,
        aliases=("../../rollout.n_gpus_per_node",),
    )
    checkpoint_engine: CheckpointEngineConfig = key("Weight sync.")
    prometheus: PrometheusConfig = key("Prometheus metrics of the engines.")
    log_prob_micro_batch_size_per_gpu: int = key(
        "Samples per rank and forward pass when old log-probs are computed.",
        follows=f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
        min=1,
    )
    log_prob_micro_batch_size: int | None = key(
        "log_prob_micro_batch_size_per_gpu summed over all ranks; converted to that key.", null="not used", min=1
    )
    log_prob_use_dynamic_bsz: bool = key(
        "Fill micro-batches of old log-probs up to a token budget.", follows=f"{_ACTOR}.use_dynamic_bsz"
    )
    log_prob_max_token_len_per_gpu: int = key(
        "Token budget per rank and forward pass when old log-probs are computed.",
        follows=f"{_ACTOR}.ppo_max_token_len_per_gpu",
        min=1,
    )
    val_kwargs: ValKwargsConfig = key("Sampling in validation.")
    multi_turn: MultiTurnConfig = key("Multi-turn generation with tools.")
    agent: AgentConfig = key("Agent loops.")


@dataclass(frozen=True)
class NativeOptions:
    """`rollout.engine_kwargs.native`: rarely used options."""

    block_size: int = 16
    """Tokens per KV block."""
    num_blocks: int | None = None
    """KV blocks; None: as many as memory allows."""
    model: str = "auto"
    """fused, generic, or auto: fused if it supports the model."""
    merge_lora: bool = False
    """Whether a weight sync sends merged weights; otherwise only the LoRA adapters, which the engine applies."""

    @classmethod
    def from_config(cls, config: GeneratorConfig) -> NativeOptions:
        values = dict(config.engine_kwargs["native"] if "native" in config.engine_kwargs else {})
        prefix, known = "engine_kwargs.native", [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"{prefix}.{unknown[0]}: unknown option. Use one of {', '.join(known)}.")
        options = cls(**values)
        if options.model not in _MODEL_KINDS:
            raise ValueError(f"{prefix}.model: {options.model!r} is unknown. Use one of {', '.join(_MODEL_KINDS)}.")
        counts = [options.block_size, *([] if options.num_blocks is None else [options.num_blocks])]
        if any(type(count) is not int or count < 1 for count in counts):
            raise ValueError(f"{prefix}: block_size and num_blocks must be integers of at least 1 (got {values}).")
        if not isinstance(options.merge_lora, bool):
            raise ValueError(f"{prefix}.merge_lora: {options.merge_lora!r} is neither true nor false.")
        return options


def applies_lora(model: ModelConfig, rollout: RolloutConfig) -> bool:
    """Whether the engine applies the policy's LoRA adapters; other engines receive merged weights."""
    options = rollout.engine_kwargs["native"] if "native" in rollout.engine_kwargs else {}
    return model.lora_rank > 0 and rollout.name == "native" and not dict(options).get("merge_lora", False)
