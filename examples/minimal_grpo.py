"""All of GRPO in one file: sample groups of answers, score them, compare within the group, update. No Ray, no config.

    python examples/minimal_grpo.py [--steps 50] [--help]

The task can be checked by a rule: put some digits in order (`4 0 7 >` → `0 4 7 .`). The model is a tiny Qwen2 with
random weights, made here. A short supervised phase teaches it the format and nothing else: it answers with the
prompt's digits in any order. GRPO then finds the right order from rewards alone: 1 if the answer is right, else 0.

GRPO is arXiv 2402.03300. The mathematics is the library's: these functions are those of a full run.
Left out of the full algorithm, and why:

- Padding. Prompts have one length here, so nothing stands on their left; answers may end early, and `mask` says where.
- A generation engine. The sequence is read anew for every token; with a handful of tokens a cache gains nothing.
- Handing weights over. One model samples and learns, so the policy that sampled *is* the old policy: its log-probs come
  with the samples. A full run has two engines, computes them anew in the trainer, and logs the difference.
- Micro-batches and ranks. Everything fits at once; a full run adds up gradients and divides by counts over all ranks.
- Checkpoints, trackers, failing rewards, non-finite gradients. `verl/trainer/ppo/ray_trainer.py` has them; its
  `_train_step` goes through the same phases as `train` below.
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
    """What a full run calls: data.train_batch_size, rollout.n, actor.ppo_mini_batch_size, actor.optim.lr, …"""

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
    """One step's answers; those to one prompt stand together. Column t belongs to the answer's token t."""

    input_ids: torch.Tensor  # [batch, prompt + response]
    responses: torch.Tensor  # [batch, response]
    mask: torch.Tensor  # [batch, response]: 1 up to and including the end token
    log_probs: torch.Tensor  # [batch, response], of the policy that sampled them
    index: list[int]  # which prompt each row answers


# ---------------------------------------------------------------- the task


def make_prompts(digits: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """(training, held-out) prompts: every way to write `digits` different digits, then the sign to answer."""
    every = [[*some, ASK] for some in permutations(range(10), digits)]
    random.Random(seed).shuffle(every)
    held_out = len(every) // 10
    return every[held_out:], every[:held_out]


def reward(prompt: list[int], answer: list[int]) -> float:
    """1 for the digits in order and then the end, else 0: no credit for parts, no word on what is wrong."""
    return float(answer == [*sorted(prompt[:-1]), END])


def in_words(tokens: list[int]) -> str:
    return " ".join(VOCABULARY[token] for token in tokens)


# ---------------------------------------------------------------- the model


def make_model(digits: int) -> PreTrainedModel:
    """About a hundred thousand random weights; any causal LM of transformers would do."""
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


def answer_logits(model: PreTrainedModel, input_ids: torch.Tensor, answer_length: int) -> torch.Tensor:
    """[batch, response, vocab]: what the model expected before it saw each token of the answer."""
    return model(input_ids=input_ids).logits[:, -answer_length - 1 : -1]


def warm_up(model: PreTrainedModel, prompts: list[list[int]], options: Options) -> None:
    """Supervised: answer with the digits of the prompt in a random order. The format, not the task."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    chooser = random.Random(options.seed)
    for _ in range(options.warm_up_steps):
        chosen = chooser.choices(prompts, k=64)
        answers = [[*chooser.sample(prompt[:-1], k=options.digits), END] for prompt in chosen]
        input_ids = torch.tensor([prompt + answer for prompt, answer in zip(chosen, answers, strict=True)])
        loss = -logprobs_from_logits(answer_logits(model, input_ids, options.digits + 1), torch.tensor(answers)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------- one step of GRPO, phase by phase


@torch.no_grad()
def generate(model: PreTrainedModel, prompts: list[list[int]], answers: int, options: Options, greedy: bool) -> Samples:
    """`answers` answers to every prompt, token by token; one token more than the right answer may be written."""
    index = [number for number in range(len(prompts)) for _ in range(answers)]
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
    """[batch, response]: the reward of each answer on its last token."""
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
    """Mini-batches of whole prompts, once each: clipped ratio and a little KL to the reference. Metrics of the last."""
    rows_per_step = options.mini_batch_prompts * options.answers
    metrics: dict[str, float] = {}
    for rows in torch.arange(len(samples.index)).split(rows_per_step):
        logits = answer_logits(model, samples.input_ids[rows], samples.responses.shape[1]) / options.temperature
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
    """The loop; returns the mean reward of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    reference = copy.deepcopy(model).requires_grad_(False)
    chooser = random.Random(options.seed + 1)
    rewards = []
    for step in range(1, options.steps + 1):
        batch = chooser.sample(prompts, k=options.prompts)
        samples = generate(model, batch, options.answers, options, greedy=False)
        scores = score(samples, batch)
        with torch.no_grad():
            logits = answer_logits(reference, samples.input_ids, samples.responses.shape[1]) / options.temperature
            reference_log_probs = logprobs_from_logits(logits, samples.responses)
        advantages, _ = compute_grpo_outcome_advantage(scores, samples.mask, samples.index)
        metrics = update(model, optimizer, samples, advantages, reference_log_probs, options)
        rewards.append(scores.sum(-1).mean().item())
        if step == 1 or step % 10 == 0:
            shown = " ".join(f"{name}={value:.3f}" for name, value in metrics.items())
            print(f"step {step:4d}  reward={rewards[-1]:.3f}  {shown}", flush=True)
    return rewards


def accuracy(model: PreTrainedModel, prompts: list[list[int]], options: Options) -> float:
    """Share of right greedy answers."""
    return score(generate(model, prompts, 1, options, greedy=True), prompts).sum(-1).mean().item()


def show(model: PreTrainedModel, prompts: list[list[int]], options: Options) -> None:
    """A few greedy answers."""
    samples = generate(model, prompts, 1, options, greedy=True)
    for prompt, answer, length in zip(prompts, samples.responses.tolist(), samples.mask.sum(-1).tolist(), strict=True):
        verdict = "right" if reward(prompt, answer[:length]) else "wrong"
        print(f"  {in_words(prompt)} {in_words(answer[:length]):<12} {verdict}")


def main(options: Options) -> None:
    torch.set_num_threads(1)  # threads cost more than they gain at this size
    torch.manual_seed(options.seed)
    started = time.perf_counter()
    training, held_out = make_prompts(options.digits, options.seed)
    model = make_model(options.digits)
    warm_up(model, training, options)
    print(f"warm-up: {time.perf_counter() - started:.1f} s; held-out accuracy {accuracy(model, held_out, options):.2f}")
    show(model, held_out[:3], options)
    train(model, training, options)
    print(f"in all: {time.perf_counter() - started:.1f} s; held-out accuracy {accuracy(model, held_out, options):.2f}")
    show(model, held_out[:3], options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Options()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    main(Options(**vars(parser.parse_args())))
