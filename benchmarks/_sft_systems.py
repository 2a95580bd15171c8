"""Supervised steps on the same rows, ours and TRL's, run as a script of its own: one line of JSON per step.

    python benchmarks/_sft_systems.py ours FOLDER --budget 16384 [--checkpointing]
    python benchmarks/_sft_systems.py trl FOLDER --budget 16384 --packing bfd|wrapped [--checkpointing]

A step ends when the device has done all of it: time between two ends holds everything, loading and logging too.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from _sft_work import SFTWork, read_work
from _shapes import synchronise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tell_step(tokens: int) -> None:
    """A step is done: when, over how many tokens, and the most memory so far: taken from the device, and used of it."""
    synchronise(DEVICE)
    taken, used = (torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()) if DEVICE == "cuda" else (0, 0)
    memory = {"peak_gb": taken / 2**30, "used_gb": used / 2**30}
    print("STEP " + json.dumps({"end": time.perf_counter(), "tokens": tokens, **memory}), flush=True)


def ours(work: SFTWork, folder: Path, options: argparse.Namespace) -> None:
    """`SFTTrainer` as `main_sft` runs it on one device."""
    from verl.config import SFTConfig, load_config
    from verl.protocol import DataProto
    from verl.trainer.supervised.sft import SFTTrainer

    class Timed(SFTTrainer):
        def _step(self, batch: DataProto) -> bool:
            stopping = super()._step(batch)
            tell_step(int(batch.batch["attention_mask"].sum()))
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
    with Timed(config) as trainer:
        trainer.start()
        trainer.fit()


def trl(work: SFTWork, folder: Path, options: argparse.Namespace) -> None:
    """TRL's SFTTrainer on the same tokens, packed to rows of `work.packed`; the loss falls on the same ones."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    counted = [0]

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            tell_step(counted[0])
            counted[0] = 0

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

    def counting(rows: Any) -> Any:
        batch = collate(rows)
        mask = batch.get("attention_mask")
        counted[0] += int(batch["input_ids"].numel() if mask is None else mask.sum())
        return batch

    trainer.data_collator = counting
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
