"""The configurations of `memory_plan.py`: models, sequence lengths and overrides, and their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _shapes import shape_config, write_model

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRADIENT_CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"
REWARD_FILE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str[:256])) % 1000 / 1000
"""
STEPS = 2


def _packed(tokens: int) -> tuple[str, ...]:
    """Micro-batches by tokens."""
    return f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}"


def _packed_rows(tokens: int) -> tuple[str, ...]:
    return "data.use_dynamic_bsz=True", f"data.max_token_len_per_gpu={tokens}"


_OFFLOAD = tuple(f"{ACTOR}.fsdp_config.{name}_offload=True" for name in ("param", "optimizer"))
_BF16_MOMENTS = (f"{ACTOR}.optim.state_dtype=bf16",)
_PPO = ("algorithm.adv_estimator=gae",)
_ASYNC = ("trainer.mode=async", "trainer.max_staleness=1")


def _lora(rank: int, block: str = "actor_rollout_ref.model") -> tuple[str, ...]:
    return f"{block}.lora_rank={rank}", f"{block}.lora_alpha={2 * rank}"


@dataclass(frozen=True)
class Case:
    """A run: `program` is train, sft or rm; `lengths`: tokens of every prompt and response; `rows`: prompts of a
    step, or rows of a step of a supervised run."""

    program: str
    shape: str
    overrides: tuple[str, ...] = ()
    lengths: tuple[int, int] = (256, 768)
    rows: int = 16
    n: int = 8

    @property
    def length(self) -> int:
        return sum(self.lengths)

    def write(self, folder: Path) -> None:
        """Write model, data and reward function."""
        positions = max(4096, self.length)
        config = shape_config(
            self.shape, pad_token_id=0, eos_token_id=1, bos_token_id=None, max_position_embeddings=positions
        )
        write_model(folder / "model", config)
        (folder / "reward.py").write_text(REWARD_FILE)
        self._write_rows(folder / "rows.parquet")

    def _write_rows(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        # The tokenizer encodes every character as one token; the template adds three to a prompt, one to a response.
        response = "b" * (self.lengths[1] - 1)
        rows: list[dict[str, Any]] = []
        for index in range(STEPS * self.rows):
            prompt = f"{index:08d}".ljust(self.lengths[0] - 3, "a")
            if self.program == "train":
                chat, reward = [{"role": "user", "content": prompt}], {"style": "rule", "ground_truth": "0"}
                rows.append({"data_source": "memory", "prompt": chat, "reward_model": reward})
            else:
                rows.append({"prompt": prompt, "response": response, "chosen": response, "rejected": response})
        pq.write_table(pa.Table.from_pylist(rows), path)

    def run_overrides(self, folder: Path) -> list[str]:
        """Return all overrides of the run."""
        common = [
            f"data.train_files={folder / 'rows.parquet'}",
            f"data.train_batch_size={self.rows}",
            f"trainer.total_training_steps={STEPS}",
            "trainer.n_gpus_per_node=1",
            f"trainer.device={'cuda' if torch.cuda.is_available() else 'cpu'}",
            "trainer.logger=[file]",
            "trainer.project_name=memory",
            "trainer.experiment_name=case",
            f"trainer.default_local_dir={folder / 'steps'}",
            "trainer.resume_mode=disable",
            "trainer.used_dir=move_aside",
            "trainer.save_freq=-1",
        ]
        program_overrides = self._train(folder) if self.program == "train" else self._supervised(folder)
        return [*common, *program_overrides, *self.overrides]

    def _train(self, folder: Path) -> list[str]:
        return [
            "algorithm.adv_estimator=grpo",
            f"data.max_prompt_length={self.lengths[0]}",
            f"data.max_response_length={self.lengths[1]}",
            "data.dataloader_num_workers=0",
            f"actor_rollout_ref.model.path={folder / 'model'}",
            f"{ROLLOUT}.n={self.n}",
            f"{ROLLOUT}.ignore_eos=True",
            f"{ACTOR}.ppo_mini_batch_size={self.rows}",
            f"{ACTOR}.checkpoint.save_contents=[extra]",
            "critic.checkpoint.save_contents=[extra]",
            f"custom_reward_function.path={folder / 'reward.py'}",
        ]

    def _supervised(self, folder: Path) -> list[str]:
        return [
            f"model.path={folder / 'model'}",
            f"data.max_length={self.length}",
            "checkpoint.save_contents=[extra]",
        ]


CASES = {
    "0.5b": Case("train", "qwen2.5-0.5b"),
    "0.5b, no checkpointing": Case("train", "qwen2.5-0.5b", (f"{GRADIENT_CHECKPOINTING}=False", *_packed(15360))),
    "0.5b, reference": Case("train", "qwen2.5-0.5b", (f"{ACTOR}.use_kl_loss=True",)),
    "0.5b, LoRA": Case("train", "qwen2.5-0.5b", _lora(16)),
    "0.5b, async": Case("train", "qwen2.5-0.5b", _ASYNC),
    "0.5b, PPO": Case("train", "qwen2.5-0.5b", _PPO),
    "0.5b, 4k": Case("train", "qwen2.5-0.5b", _packed(16384), (1024, 3072)),
    "0.5b, 16k": Case("train", "qwen2.5-0.5b", _packed(16384), (1024, 15360), rows=4, n=4),
    "0.5b, 32k": Case("train", "qwen2.5-0.5b", _packed(32768), (1024, 31744), rows=2, n=4),
    "1.5b": Case("train", "qwen2.5-1.5b"),
    "1.5b, PPO, offload": Case(
        "train", "qwen2.5-1.5b", (*_PPO, *_OFFLOAD, "critic.fsdp_config.optimizer_offload=True")
    ),
    "1.5b, async, 8k": Case("train", "qwen2.5-1.5b", (*_ASYNC, *_packed(16384)), (1024, 7168), rows=4, n=4),
    "3b, offload": Case("train", "qwen2.5-3b", (*_OFFLOAD, *_packed(8192)), (512, 1536)),
    "7b, bf16 moments": Case("train", "qwen2.5-7b", (*_BF16_MOMENTS, *_packed(7680)), (256, 512)),
    "7b, LoRA, 4k": Case("train", "qwen2.5-7b", (*_lora(32), *_packed(8192)), (1024, 3072), rows=4, n=8),
    "sft 0.5b, 4k": Case("sft", "qwen2.5-0.5b", _packed_rows(16384), (1024, 3072), rows=32),
    "sft 1.5b, 32k": Case("sft", "qwen2.5-1.5b", _packed_rows(32768), (1024, 31744), rows=4),
    "sft 7b, LoRA": Case("sft", "qwen2.5-7b", (*_lora(16, "model"), *_packed_rows(8192)), (1024, 3072), rows=8),
    "rm 0.5b": Case("rm", "qwen2.5-0.5b", (), (512, 1536), rows=16),
    "rm 1.5b, 4k": Case("rm", "qwen2.5-1.5b", _packed_rows(16384), (1024, 3072), rows=8),
}
# Without a GPU: these only test the script.
TINY_CASES = {
    "tiny": Case("train", "tiny", (), (16, 32), rows=4, n=2),
    "tiny, PPO": Case("train", "tiny", _PPO, (16, 32), rows=4, n=2),
    "tiny, sft": Case("sft", "tiny", (), (16, 32), rows=4),
    "tiny, rm": Case("rm", "tiny", (), (16, 32), rows=4),
}
