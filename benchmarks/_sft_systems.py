"""The workload of `sft.py`, and the script that trains on it with verl or TRL and prints a line of JSON per step.

    python benchmarks/_sft_systems.py ours FOLDER --budget 16384 [--checkpointing]
    python benchmarks/_sft_systems.py trl FOLDER --budget 16384 --packing bfd|wrapped [--checkpointing]

A step ends when the device has finished it, so the time between two ends includes data loading and logging.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _shapes import shape_config, synchronise, write_model

from verl.utils.balancing import SequenceCost

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.tiny import tiny_tokenizer

# Tokens that the chat template adds to a row: two roles, two end tokens.
_TEMPLATE_TOKENS = 4
_MIN_LENGTH = 16


@dataclass(frozen=True)
class SFTWork:
    """`rows` per step of about `mean` tokens (lognormal, at most `longest`); TRL packs them to `packed` tokens."""

    shape: str
    rows: int
    mean: int
    longest: int
    packed: int
    steps: int
    seed: int = 7

    def lengths(self) -> np.ndarray:
        """[steps × rows]: tokens of every row. A quarter of each row is the prompt."""
        return _lengths(self)

    def mean_tokens(self) -> float:
        """Mean tokens per step."""
        return float(self.lengths().sum()) / self.steps

    def update_flops_per_token(self) -> float:
        """FLOPs of an update without padding and recomputation, with logits only for tokens in the loss."""
        lengths = self.lengths()
        responses = lengths - lengths // 4
        forward = SequenceCost.from_config(self.model_config().to_dict())(lengths, responses).sum()
        return float(3 * forward / lengths.sum())

    def title(self) -> str:
        lengths = self.lengths()
        return (
            f"{self.shape}, {self.rows} rows per step, mean {lengths.mean():.0f}, max {lengths.max()} tokens, "
            f"{self.mean_tokens():.0f} tokens per step"
        )

    def model_config(self) -> Any:
        return shape_config(self.shape, pad_token_id=0, eos_token_id=1, bos_token_id=None)

    def write(self, folder: Path) -> Path:
        """Write model, tokenizer and rows to `folder`: as text for verl, as the same tokens for TRL."""
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder / "model", self.model_config())
        self._write_rows(folder / "rows.parquet")
        (folder / "work.json").write_text(json.dumps(asdict(self)))
        return folder

    def _write_rows(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        tokenizer, rng, rows = tiny_tokenizer(), np.random.default_rng(self.seed), []
        for length in self.lengths():
            # The tokenizer encodes every character as one token.
            text = "".join(map(chr, rng.integers(97, 123, length - _TEMPLATE_TOKENS)))
            split = int(length) // 4
            prompt, response = text[:split], text[split:]
            prompt_ids = tokenizer(f"<|user|>{prompt}<|end|><|assistant|>")["input_ids"]
            response_ids = tokenizer(f"{response}<|end|>")["input_ids"]
            mask = [0] * len(prompt_ids) + [1] * len(response_ids)
            tokens = {"input_ids": prompt_ids + response_ids, "completion_mask": mask}
            rows.append({"prompt": prompt, "response": response, **tokens})
        pq.write_table(pa.Table.from_pylist(rows), path)


@cache
def _lengths(work: SFTWork) -> np.ndarray:
    shares = np.random.default_rng(work.seed).lognormal(0.0, 0.8, work.steps * work.rows)
    lengths = shares / shares.mean() * work.mean
    return np.clip(np.rint(lengths), _MIN_LENGTH, work.longest).astype(np.int64)


def read_work(folder: Path) -> SFTWork:
    """Read the workload from a folder written by `SFTWork.write`."""
    return SFTWork(**json.loads((folder / "work.json").read_text()))


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def print_step(tokens: int) -> None:
    """Print a line for a finished step: time, tokens, and peak memory so far (reserved and allocated by torch)."""
    synchronise(DEVICE)
    reserved, allocated = (
        (torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()) if DEVICE == "cuda" else (0, 0)
    )
    memory = {"peak_gb": reserved / 2**30, "used_gb": allocated / 2**30}
    print("STEP " + json.dumps({"end": time.perf_counter(), "tokens": tokens, **memory}), flush=True)


def ours(work: SFTWork, folder: Path, options: argparse.Namespace) -> None:
    """`SFTTrainer` as `main_sft` runs it on one device."""
    from verl.config import SFTConfig, load_config
    from verl.protocol import DataProto
    from verl.trainer.supervised.sft import SFTTrainer

    class TimedTrainer(SFTTrainer):
        def _step(self, batch: DataProto) -> bool:
            stopping = super()._step(batch)
            print_step(int(batch.batch["attention_mask"].sum()))
            return stopping

    config = load_config(
        None,
        [
            f"model.path={folder / 'model'}",
            f"model.enable_gradient_checkpointing={options.checkpointing}",
            f"data.train_files={folder / 'rows.parquet'}",
            f"data.train_batch_size={work.rows}",
            f"data.max_length={work.longest}",
            "data.shuffle=False",
            "data.use_dynamic_bsz=True",
            f"data.max_token_len_per_gpu={options.budget}",
            "checkpoint.save_contents=[extra]",
            "optim.lr_scheduler=constant",
            f"trainer.default_local_dir={folder / 'steps'}",
            "trainer.resume_mode=disable",
            "trainer.used_dir=move_aside",
            "trainer.save_freq=-1",
            f"trainer.total_training_steps={work.steps}",
            f"trainer.device={DEVICE}",
            "trainer.n_gpus_per_node=1",
            "trainer.logger=[file]",
            "trainer.project_name=sft",
            f"trainer.experiment_name={folder.name}",
        ],
        root=SFTConfig,
    )
    with TimedTrainer(config) as trainer:
        trainer.start()
        trainer.fit()


def trl(work: SFTWork, folder: Path, options: argparse.Namespace) -> None:
    """TRL's SFTTrainer on the same tokens with the same loss mask, packed to rows of `work.packed` tokens."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    step_tokens = [0]

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            print_step(step_tokens[0])
            step_tokens[0] = 0

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    rows = max(1, options.budget // work.packed)
    settings = SFTConfig(
        output_dir=str(folder / "trl"),
        bf16=DEVICE == "cuda",
        use_cpu=DEVICE == "cpu",
        packing=True,
        packing_strategy=options.packing,
        max_length=work.packed,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=max(1, round(work.mean_tokens() / (rows * work.packed))),
        gradient_checkpointing=options.checkpointing,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_steps=work.steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        optim="adamw_torch_fused" if DEVICE == "cuda" else "adamw_torch",
        dataset_num_proc=None,
    )
    data = Dataset.from_parquet(str(folder / "rows.parquet")).select_columns(["input_ids", "completion_mask"])
    trainer = SFTTrainer(
        model,
        args=settings,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Steps()],
    )
    collate = trainer.data_collator

    def collate_and_count(rows: Any) -> Any:
        batch = collate(rows)
        mask = batch.get("attention_mask")
        step_tokens[0] += int(batch["input_ids"].numel() if mask is None else mask.sum())
        return batch

    trainer.data_collator = collate_and_count
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=("ours", "trl"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--budget", type=int, required=True, help="tokens of a forward pass")
    parser.add_argument("--packing", choices=("bfd", "wrapped"), default="bfd")
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    {"ours": ours, "trl": trl}[options.system](read_work(options.folder), options.folder, options)


if __name__ == "__main__":
    main()
