"""All of GRPO in one file: sample groups of responses, score them, compute group advantages, update. No Ray, no config.

    python examples/minimal_grpo.py [--steps 50] [--help]

The task has a rule-based reward: sort some digits (`4 0 7 >` → `0 4 7 .`). The model is a tiny Qwen2 with random
weights. A short supervised phase teaches it only the format: the digits of the prompt in random order. GRPO then learns
the order from rewards alone: 1 for a correct response, else 0.

GRPO is arXiv 2402.03300. The losses and advantages are the library functions that a full run uses.
Differences from a full run:

- No padding of prompts: all have the same length. Responses may end early; `mask` marks their tokens.
- No generation engine: the sequence is recomputed for every token; a KV cache does not pay off for so few tokens.
- No weight sync: one model samples and trains, so the log-probs of sampling are those of the old policy. A full run has
  two engines, recomputes the log-probs in the trainer and logs the difference.
- No micro-batches or ranks: a full run accumulates gradients and divides by token counts over all ranks.
- No checkpoints, trackers, failing rewards or non-finite gradients: see `verl/trainer/ppo/ray_trainer.py`; its
  `_train_step` has the same phases as `train` below.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from dataclasses import dataclass
from itertools import permutations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_kl_loss, compute_policy_loss
from verl.utils.torch_functional import (
    entropy_from_logits,
    get_response_mask,
    logprobs_from_logits,
    masked_mean,
)

# Tokens 0-9 are the digits.
ASK, END = 10, 11
VOCABULARY = "0123456789>."


@dataclass
class Options:
    """Corresponds to data.train_batch_size, rollout.n, actor.ppo_mini_batch_size, actor.optim.lr, … of a full run."""

    steps: int = 50
    prompts: int = 32
    answers: int = 8
    mini_batch_prompts: int = 16
    digits: int = 3
    learning_rate: float = 5e-4
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.001
    temperature: float = 1.0
    warm_up_steps: int = 120
    seed: int = 0


@dataclass
class Samples:
    """The responses of one step, grouped by prompt. Column t belongs to token t of the response."""

    input_ids: torch.Tensor  # [batch, prompt + response]
    responses: torch.Tensor  # [batch, response]
    mask: torch.Tensor  # [batch, response]: 1 up to and including the end token
    log_probs: torch.Tensor  # [batch, response]: of the sampling policy
    index: list[int]  # [batch]: number of the prompt


# ---------------------------------------------------------------- the task


def make_prompts(digits: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """(training, held-out) prompts: all permutations of `digits` different digits, each followed by `>`."""
    prompts = [[*permutation, ASK] for permutation in permutations(range(10), digits)]
    random.Random(seed).shuffle(prompts)
    held_out = len(prompts) // 10
    return prompts[held_out:], prompts[:held_out]


def reward(prompt: list[int], response: list[int]) -> float:
    """1 for the sorted digits followed by the end token, else 0: no partial credit."""
    return float(response == [*sorted(prompt[:-1]), END])


def to_text(tokens: list[int]) -> str:
    return " ".join(VOCABULARY[token] for token in tokens)


# ---------------------------------------------------------------- the model


def make_model(digits: int) -> PreTrainedModel:
    """A model of about 100k random parameters; any causal LM of transformers would work."""
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4 * digits,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config)


def response_logits(model: PreTrainedModel, input_ids: torch.Tensor, response_length: int) -> torch.Tensor:
    """[batch, response, vocab]: the logits that predict each token of the response."""
    return model(input_ids=input_ids).logits[:, -response_length - 1 : -1]


def warm_up(model: PreTrainedModel, prompts: list[list[int]], options: Options) -> None:
    """Supervised training on the digits of the prompt in random order: teaches the format, not the task."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    chooser = random.Random(options.seed)
    for _ in range(options.warm_up_steps):
        chosen = chooser.choices(prompts, k=64)
        responses = [[*chooser.sample(prompt[:-1], k=options.digits), END] for prompt in chosen]
        input_ids = torch.tensor([prompt + response for prompt, response in zip(chosen, responses, strict=True)])
        logits = response_logits(model, input_ids, options.digits + 1)
        loss = -logprobs_from_logits(logits, torch.tensor(responses)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------- one step of GRPO, phase by phase


@torch.no_grad()
def generate(model: PreTrainedModel, prompts: list[list[int]], n: int, options: Options, greedy: bool) -> Samples:
    """Sample `n` responses per prompt, token by token; the limit is one token more than a correct response has."""
    index = [number for number in range(len(prompts)) for _ in range(n)]
    input_ids = torch.tensor([prompts[number] for number in index])
    log_probs = []
    for _ in range(options.digits + 2):
        logits = model(input_ids=input_ids).logits[:, -1] / options.temperature
        token = logits.argmax(-1) if greedy else torch.distributions.Categorical(logits=logits).sample()
        log_probs.append(logprobs_from_logits(logits, token))
        input_ids = torch.cat([input_ids, token[:, None]], dim=1)
    responses = input_ids[:, options.digits + 1 :]
    mask = get_response_mask(responses, eos_token=END)
    return Samples(input_ids, responses, mask, torch.stack(log_probs, dim=1), index)


def score(samples: Samples, prompts: list[list[int]]) -> torch.Tensor:
    """[batch, response]: the reward of each response on its last token."""
    lengths = samples.mask.sum(-1)
    scores = torch.zeros(samples.responses.shape)
    for row, (number, length) in enumerate(zip(samples.index, lengths.tolist(), strict=True)):
        scores[row, length - 1] = reward(prompts[number], samples.responses[row, :length].tolist())
    return scores


def update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    samples: Samples,
    advantages: torch.Tensor,
    reference_log_probs: torch.Tensor,
    options: Options,
) -> dict[str, float]:
    """One pass over mini-batches of complete groups: clipped ratio and KL loss. Returns the metrics of the last one."""
    mini_batch_rows = options.mini_batch_prompts * options.answers
    metrics: dict[str, float] = {}
    for rows in torch.arange(len(samples.index)).split(mini_batch_rows):
        logits = response_logits(model, samples.input_ids[rows], samples.responses.shape[1]) / options.temperature
        log_probs = logprobs_from_logits(logits, samples.responses[rows])
        mask = samples.mask[rows]
        policy_loss, clipfrac, approx_kl, _ = compute_policy_loss(
            samples.log_probs[rows],
            log_probs,
            advantages[rows],
            mask,
            cliprange_low=options.clip_low,
            cliprange_high=options.clip_high,
        )
        kl = compute_kl_loss(log_probs, reference_log_probs[rows], mask, "low_var_kl")
        (policy_loss + options.kl_coef * kl).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        metrics = {
            "kl": kl.item(),
            "clipfrac": clipfrac.item(),
            "approx_kl": approx_kl.item(),
            "grad_norm": norm.item(),
            "entropy": masked_mean(entropy_from_logits(logits.detach()), mask).item(),
        }
    return metrics


def train(model: PreTrainedModel, prompts: list[list[int]], options: Options) -> list[float]:
    """The training loop; returns the mean reward of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    reference = copy.deepcopy(model).requires_grad_(False)
    chooser = random.Random(options.seed + 1)
    rewards = []
    for step in range(1, options.steps + 1):
        batch = chooser.sample(prompts, k=options.prompts)
        samples = generate(model, batch, options.answers, options, greedy=False)
        scores = score(samples, batch)
        with torch.no_grad():
            logits = response_logits(reference, samples.input_ids, samples.responses.shape[1]) / options.temperature
            reference_log_probs = logprobs_from_logits(logits, samples.responses)
        advantages, _ = compute_grpo_outcome_advantage(scores, samples.mask, samples.index)
        metrics = update(model, optimizer, samples, advantages, reference_log_probs, options)
        rewards.append(scores.sum(-1).mean().item())
        if step == 1 or step % 10 == 0:
            shown = " ".join(f"{name}={value:.3f}" for name, value in metrics.items())
            print(f"step {step:4d}  reward={rewards[-1]:.3f}  {shown}", flush=True)
    return rewards


def accuracy(model: PreTrainedModel, prompts: list[list[int]], options: Options) -> float:
    """Share of correct greedy responses."""
    return score(generate(model, prompts, 1, options, greedy=True), prompts).sum(-1).mean().item()


def show(model: PreTrainedModel, prompts: list[list[int]], options: Options) -> None:
    """Print greedy responses."""
    samples = generate(model, prompts, 1, options, greedy=True)
    lengths = samples.mask.sum(-1).tolist()
    for prompt, response, length in zip(prompts, samples.responses.tolist(), lengths, strict=True):
        verdict = "right" if reward(prompt, response[:length]) else "wrong"
        print(f"  {to_text(prompt)} {to_text(response[:length]):<12} {verdict}")


def main(options: Options) -> None:
    torch.set_num_threads(1)  # more threads are slower at this size
    torch.manual_seed(options.seed)
    started = time.perf_counter()
    training, held_out = make_prompts(options.digits, options.seed)
    model = make_model(options.digits)
    warm_up(model, training, options)
    print(f"warm-up: {time.perf_counter() - started:.1f} s; held-out accuracy {accuracy(model, held_out, options):.2f}")
    show(model, held_out[:3], options)
    train(model, training, options)
    print(f"total: {time.perf_counter() - started:.1f} s; held-out accuracy {accuracy(model, held_out, options):.2f}")
    show(model, held_out[:3], options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Options()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    main(Options(**vars(parser.parse_args())))
