"""`reward_model.*` and `custom_reward_function.*`: where scores come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config import names
from verl.config.engine import FSDPConfig, MegatronConfig, RewardModelModelConfig
from verl.config.schema import Block, key


@dataclass(kw_only=True, slots=True)
class OverlongBufferConfig(Block):
    enable: bool = key("Penalise answers that run into the length limit (dapo reward manager).")
    len: int = key("Tokens before the limit in which the penalty grows.", min=1)
    penalty_factor: float = key("The penalty at the limit.", min=0)
    log: bool = key("Log the penalty as a metric.")


@dataclass(kw_only=True, slots=True)
class JudgeConfig(Block):
    enable: bool = key("Score with a language model that writes a judgement of each answer.")
    template: str = key(
        "What it is asked, in Jinja (prompt, messages, answer, ground_truth, extra_info): a text or a file (*.jinja)."
    )
    system: str | None = key("A system message before that.", null="none")
    parser: str = key("How its score is read.", choices=("json", "regex"))
    field: str = key("json: the number's name in the last JSON object of the judgement.")
    json_schema: dict[str, Any] = key("json: the schema of its judgement; {}: a reason, then the number.")
    constrain: bool = key("json: hold the judge to that schema (response_format).")
    pattern: str = key("regex: its first group is the number; the last match counts.")
    low: float = key("Its lowest score, which becomes 0; a number outside is no score.")
    high: float = key("Its highest score, which becomes 1.")
    n: int = key("Judgements of each answer; their mean is the score.", min=1)
    max_tokens: int = key("Longest judgement.", min=1)
    temperature: float = key("Of its sampling.", min=0)
    model: str | None = key("What the server calls the model.", null="the only one that it has")


@dataclass(kw_only=True, slots=True)
class RewardRolloutConfig(Block):
    name: str = key(
        "Engine that serves the reward model.",
        choices=("native",),
        refused={
            other: ("only the native engine serves a reward model", "Start it yourself and set reward_model.url")
            for other in ("vllm", "sglang", "trtllm", "hf")
        },
    )
    gpu_memory_utilization: float = key("Share of a GPU that its weights and KV memory take.", above=0, max=1)
    max_model_len: int | None = key("Longest question and judgement together.", null="what the model reads", min=1)
    max_num_seqs: int = key("Requests that it works on at once.", min=1)
    dtype: str = key("Of its weights.", choices=("auto", "bfloat16", "float16", "float32"))
    enforce_eager: bool = key("No CUDA graphs.")


@dataclass(kw_only=True, slots=True)
class RewardModelConfig(Block):
    enable: bool = key("Score with a reward model on devices.")
    path: str | None = key(
        "Its local folder, hub name or URL.", null="not set", path=True, aliases=("model.path", "model_path")
    )
    url: str | None = key(
        "A server that scores answers (host:port or URL); functions of yours get it as reward_router_address.",
        null="none",
    )
    model: RewardModelModelConfig = key("How it is loaded.")
    strategy: str = key("Engine.", null="", follows="actor_rollout_ref.actor.strategy", choices=names.STRATEGIES)
    micro_batch_size_per_gpu: int = key(
        "Samples per rank and forward pass.",
        null="",
        follows="actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        min=1,
    )
    micro_batch_size: int | None = key(
        "The same, counted over all ranks; folded into micro_batch_size_per_gpu.", null="not used", min=1
    )
    use_dynamic_bsz: bool = key(
        "Fill micro-batches up to a token budget.", null="", follows="actor_rollout_ref.actor.use_dynamic_bsz"
    )
    forward_max_token_len_per_gpu: int = key(
        "That budget: tokens per rank and forward pass.",
        null="",
        follows="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        min=1,
    )
    max_length: int | None = key(
        "Longest text in its own tokens, where they are not the policy's; a longer one loses its beginning.",
        null="what its tokenizer says",
        min=1,
    )
    use_torch_compile: bool = key(
        "Compile the layers (packed tokens on CUDA only).",
        null="",
        follows="actor_rollout_ref.actor.use_torch_compile",
    )
    ulysses_sequence_parallel_size: int = key(
        "Ranks each sequence is split over (Ulysses, fsdp).",
        min=1,
        aliases=("fsdp_config.ulysses_sequence_parallel_size",),
    )
    fsdp_config: FSDPConfig = key("The fsdp engine.")
    megatron_config: MegatronConfig = key("The megatron engine.", aliases=("megatron",))
    judge: JudgeConfig = key("A language model as the reward model.")
    rollout: RewardRolloutConfig = key("Serving it here, for a judge or for custom_reward_function.")
    enable_resource_pool: bool = key("Give the reward model devices of its own (reward_pool).")
    n_gpus_per_node: int = key("Size of reward_pool per node.", null="", follows="trainer.n_gpus_per_node", min=1)
    nnodes: int = key("Nodes of reward_pool.", min=1)
    reward_manager: str = key(
        "How rewards are called: naive (by answer), batch (by list), prime (tight limits), dapo (overlong_buffer).",
        choices=names.REWARD_MANAGERS,
        extendable=True,
        aliases=("../reward.reward_manager.name",),
    )
    reward_kwargs: dict[str, Any] = key(
        "Arguments for the manager: timeout (s per call), num_processes, memory_limit_gb (each), batch_size (batch).",
        aliases=("../reward.reward_kwargs",),
    )
    skip_special_tokens: bool = key("Leave special tokens (end of turn, think, tool call …) out of the text it reads.")
    overlap: bool = key("Score answers as they are finished, while others are still being generated.")
    overlong_buffer: OverlongBufferConfig = key("Penalty for answers that are too long.")
    on_error: str = key(
        "When a reward function raises, hangs, dies or returns no finite number: stop, score 0, or mask the sample.",
        choices=("fail", "zero", "mask"),
    )


@dataclass(kw_only=True, slots=True)
class CustomRewardFunctionConfig(Block):
    path: str | None = key("Python file (or module) of your reward function.", null="ours, by data_source", path=True)
    name: str = key("Its name in that file.")
    reward_kwargs: dict[str, Any] = key("Arguments passed to every call, e.g. format_score.")
