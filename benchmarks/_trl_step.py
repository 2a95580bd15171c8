"""TRL's GRPO on the same workload, as a separate script that prints one line of JSON per step.

    python benchmarks/_trl_step.py FOLDER CASE --micro 32 [--beta 0.001] [--dtype float32] [--checkpointing]
    python benchmarks/_trl_step.py FOLDER CASE --micro 32 --vllm [--lora-rank 32]

Without `--vllm`, generation is transformers' `generate` (TRL's default without a server), all responses of a step in
one batch. The length of every response is forced: the end token is masked before its position and the only choice
there. With `--vllm`, generation is a colocated vLLM with TRL's default share of memory, and every request has its own
`max_tokens`; checkpointing and optimizer are TRL's defaults. The first step is a warm-up with short responses and is
not counted.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _shapes import synchronise
from _training_work import Work, read_work

WARM_UP_TOKENS = 16


def rewards(completions: list[Any], **_: Any) -> list[float]:
    """The same as `REWARD_FILE` of verl's runs."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [(sum(map(ord, text[:256])) + 7 * len(text)) % 1000 / 1000 for text in texts]


class ForcedEnds:
    """A logits processor: row i ends exactly at token `lengths[i]`."""

    def __init__(self, lengths: torch.Tensor, eos: int) -> None:
        self.lengths, self.eos = lengths, eos
        self.prompt: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`input_ids` [rows, tokens], `scores` [rows, vocab]."""
        self.prompt = input_ids.shape[1] if self.prompt is None else self.prompt
        last = self.lengths == input_ids.shape[1] - self.prompt + 1
        ends = scores[:, self.eos].clone()
        scores = scores.masked_fill(last[:, None], -torch.inf)
        scores[:, self.eos] = torch.where(last, ends, -torch.inf)
        return scores


class Clock:
    """Seconds and peak memory by phase of one step."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.peak_gb: dict[str, float] = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            self.record_peak("update")
            start = self.now()
            result = call(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - start
            self.record_peak(name)
            return result

        return timed_call

    def now(self) -> float:
        synchronise(self.device)
        return time.perf_counter()

    def record_peak(self, name: str) -> None:
        if self.device == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**30
            self.peak_gb[name] = max(self.peak_gb.get(name, 0.0), peak)
            torch.cuda.reset_peak_memory_stats()


def make_trainer(work: Work, folder: Path, options: argparse.Namespace, clock: Clock) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    cuda = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=getattr(torch, options.dtype))
    data = Dataset.from_parquet(str(folder / f"{work.case}.parquet")).select_columns(["prompt"])
    # Without these keys, TRL checkpoints activations and uses the optimizer that transformers selects.
    more: dict[str, Any] = {
        "gradient_checkpointing": options.checkpointing,
        "optim": "adamw_torch_fused" if cuda else "adamw_torch",
    }
    if options.vllm:
        more = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.3,
            "generation_kwargs": {"ignore_eos": True},
        }
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        bf16=cuda,
        use_cpu=not cuda,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        beta=options.beta,
        num_generations=work.n,
        per_device_train_batch_size=options.micro,
        gradient_accumulation_steps=work.samples // options.micro,
        max_completion_length=work.longest,
        shuffle_dataset=False,
        temperature=1.0,
        max_steps=options.steps,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **more,
    )

    class Steps(TrainerCallback):
        """Prints a line for every finished step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.seconds, clock.peak_gb = {}, {}
            self.start = clock.now()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = clock.now() - self.start
            clock.record_peak("update")
            step = {
                "step": state.global_step - 1,
                "seconds": {**clock.seconds, "step": seconds},
                "peak_gb": clock.peak_gb,
                "precision": precision(trainer.model, trainer.optimizer),
            }
            print("STEP " + json.dumps(step), flush=True)

    trainer = GRPOTrainer(
        model,
        reward_funcs=rewards,
        args=settings,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Steps()],
        peft_config=lora_config(options.lora_rank) if options.lora_rank else None,
    )
    force_lengths(trainer, work, clock, options.vllm)
    trainer._generate_and_score_completions = clock.timed("rollout", trainer._generate_and_score_completions)
    trainer._calculate_rewards = clock.timed("reward", trainer._calculate_rewards)
    return trainer


def lora_config(rank: int) -> Any:
    """The adapters that verl trains with `model.lora_rank`."""
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def precision(model: Any, optimizer: Any) -> str:
    """The actual dtypes of trained weights and of the optimizer's moments."""
    weights = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}
    unwrapped = getattr(optimizer, "optimizer", optimizer)
    moments = {
        str(value.dtype).removeprefix("torch.")
        for state in unwrapped.state.values()
        for name, value in state.items()
        if name.startswith("exp_avg")
    }
    return f"weights {'+'.join(sorted(weights))}, moments {'+'.join(sorted(moments))}"


def force_lengths(trainer: Any, work: Work, clock: Clock, vllm: bool) -> None:
    """Force the scheduled length of every response, and time generation and weight sync."""
    from transformers import LogitsProcessorList

    def lengths_of_step() -> torch.Tensor:
        lengths = torch.tensor(work.lengths(trainer.state.global_step).ravel())
        return lengths.clamp(max=WARM_UP_TOKENS) if trainer.state.global_step == 0 else lengths

    if vllm:
        engine = trainer.vllm_generation
        engine.llm.generate = clock.timed("generate", with_lengths(engine.llm.generate, lengths_of_step))
        engine.sync_weights = clock.timed("update_weights", engine.sync_weights)
        return
    generate = trainer.model.generate

    def generate_scheduled(*args: Any, **kwargs: Any) -> Any:
        lengths = lengths_of_step().to(trainer.accelerator.device)
        ends = ForcedEnds(lengths, trainer.processing_class.eos_token_id)
        return generate(*args, logits_processor=LogitsProcessorList([ends]), **kwargs)

    trainer.model.generate = clock.timed("generate", generate_scheduled)


def with_lengths(generate: Callable[..., Any], lengths_of_step: Callable[[], torch.Tensor]) -> Callable[..., Any]:
    """Return vLLM's `generate` with `max_tokens` of each prompt from `lengths_of_step()`."""

    def generate_scheduled(prompts: Any, *args: Any, sampling_params: Any, **kwargs: Any) -> Any:
        lengths = lengths_of_step().tolist()
        if len(lengths) != len(prompts) or sampling_params.n != 1:
            raise ValueError(
                f"{len(prompts)} prompts with n={sampling_params.n}, but {len(lengths)} lengths. This version of TRL"
                " groups requests in another way; adapt `with_lengths`."
            )
        params = [copy.copy(sampling_params) for _ in lengths]
        for one, length in zip(params, lengths, strict=True):
            one.max_tokens = length
        return generate(prompts, *args, sampling_params=params, **kwargs)

    return generate_scheduled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("case")
    parser.add_argument("--micro", type=int, default=32)
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    work = read_work(options.folder, options.case)
    clock = Clock("cuda" if torch.cuda.is_available() else "cpu")
    make_trainer(work, options.folder, options, clock).train()


if __name__ == "__main__":
    main()
