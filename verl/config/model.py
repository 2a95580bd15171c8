"""`*.model.*`: which weights a role starts from and how its forward pass runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.schema import Block, key

_RANK_DOC = "Rank of the LoRA adapters (needs the extra `lora`); 0: train all weights."
_ALPHA_DOC = "Scale of the LoRA adapters: their product counts lora_alpha / lora_rank times."
_TARGETS_DOC = "Layers with an adapter: [all-linear] (not the output head), ends of names, or one regular expression."
_EXCLUDED_DOC = "Layers that get no adapter: ends of names, or one regular expression."


@dataclass(kw_only=True, slots=True)
class ModelConfig(Block):
    path: str = key(
        "Local folder, hub name or URL of the model; a global_step_N folder of ours works too.",
        required="Qwen/Qwen2.5-0.5B-Instruct",
        path=True,
    )
    trust_remote_code: bool = key("Run Python code that comes with the model.")
    use_remove_padding: bool = key("Run every pass on packed tokens without padding.")
    enable_gradient_checkpointing: bool = key(
        "Recompute activations in the backward pass: about half of their memory for a third more compute.",
        aliases=("../actor.fsdp_config.gradient_checkpointing",),
    )
    override_config: dict[str, Any] = key("Values that replace those of the model's own config.json.")
    lora_rank: int = key(_RANK_DOC, min=0)
    lora_alpha: float = key(_ALPHA_DOC, above=0)
    target_modules: list[str] = key(_TARGETS_DOC)
    exclude_modules: list[str] = key(_EXCLUDED_DOC, null="none")


@dataclass(kw_only=True, slots=True)
class CriticModelConfig(Block):
    path: str = key("Model that gets the value head.", null="", follows="actor_rollout_ref.model.path", path=True)
    trust_remote_code: bool = key(
        "Run Python code that comes with the model.", null="", follows="actor_rollout_ref.model.trust_remote_code"
    )
    use_remove_padding: bool = key(
        "Run every pass on packed tokens without padding.",
        null="",
        follows="actor_rollout_ref.model.use_remove_padding",
    )
    enable_gradient_checkpointing: bool = key(
        "Recompute activations in the backward pass.", aliases=("../fsdp_config.gradient_checkpointing",)
    )
    override_config: dict[str, Any] = key("Values that replace those of the model's own config.json.")
    lora_rank: int = key(_RANK_DOC + " The value head always learns.", min=0)
    lora_alpha: float = key(_ALPHA_DOC, above=0)
    target_modules: list[str] = key(_TARGETS_DOC)
    exclude_modules: list[str] = key(_EXCLUDED_DOC, null="none")


@dataclass(kw_only=True, slots=True)
class RewardModelModelConfig(Block):
    input_tokenizer: str | None = key(
        "Tokenizer that the texts arrive in, when the reward model has another one.",
        null="the actor's; where tokenizer or chat template differ, prompts are written anew from their messages",
        path=True,
    )
    trust_remote_code: bool = key(
        "Run Python code that comes with the model.", null="", follows="actor_rollout_ref.model.trust_remote_code"
    )
    use_remove_padding: bool = key(
        "Run every pass on packed tokens without padding.",
        null="",
        follows="actor_rollout_ref.model.use_remove_padding",
    )
    override_config: dict[str, Any] = key("Values that replace those of the model's own config.json.")
