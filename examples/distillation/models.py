"""Teacher and student models for the word problems of the quick start: sampling, and their agreement."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))
from task import MODEL, word_tokenizer

# A tenth of the teacher's size: 44 thousand parameters.
STUDENT = {**MODEL, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1}
MAX_TOKENS = 12


def make_student(folder: Path, seed: int = 2) -> Path:
    """Random weights of the small model, with the tokenizer of the large one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = word_tokenizer()
    torch.manual_seed(seed)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), **ids, **STUDENT)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def questions(file: Path, tokenizer: Any) -> torch.Tensor:
    """[rows, tokens]: the prompts of a file, all of one length."""
    chats = pq.read_table(file, columns=["prompt"]).column("prompt").to_pylist()
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])


@torch.no_grad()
def sample_responses(model: Any, prompts: torch.Tensor, greedy: bool, seed: int = 0) -> torch.Tensor:
    """[rows, MAX_TOKENS]: token ids, padded after the end token."""
    generator, responses = torch.Generator().manual_seed(seed), []
    pad, end = model.config.pad_token_id, model.config.eos_token_id
    ended, ids, past = torch.zeros(len(prompts), dtype=torch.bool), prompts, None
    for _ in range(MAX_TOKENS):
        output = model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        p, past = output.logits[:, -1].softmax(-1), output.past_key_values
        token = p.argmax(-1) if greedy else torch.multinomial(p, 1, generator=generator)[:, 0]
        responses.append(torch.where(ended, pad, token))
        ended, ids = ended | (token == end), responses[-1][:, None]
    return torch.stack(responses, dim=1)


@torch.no_grad()
def agreement(student: Any, teacher: Any, prompts: torch.Tensor, seed: int = 0) -> Mapping[str, float]:
    """KL to the teacher at every token of the student's sampled responses, share of equal most likely next tokens, and
    share of equal greedy responses."""
    responses = sample_responses(student, prompts, greedy=False, seed=seed)
    ids, first = torch.cat([prompts, responses], dim=1), prompts.shape[1] - 1
    q, p = (model(input_ids=ids).logits[:, first:-1].log_softmax(-1) for model in (student, teacher))
    real = responses != student.config.pad_token_id
    reverse = (q.exp() * (q - p)).sum(-1)[real].mean()
    same_next = (q.argmax(-1) == p.argmax(-1))[real].float().mean()
    greedy = [sample_responses(model, prompts, greedy=True) for model in (student, teacher)]
    return {
        "KL to the teacher": float(reverse),
        "same next token": float(same_next),
        "same greedy answer": float((greedy[0] == greedy[1]).all(-1).float().mean()),
    }


def write_responses(teacher: Any, prompts: torch.Tensor, tokenizer: Any, file: Path) -> Path:
    """Write sampled responses of the teacher as rows for supervised training."""
    responses = sample_responses(teacher, prompts, greedy=False)
    special = set(tokenizer.all_special_ids)
    text = lambda ids: " ".join(tokenizer.convert_ids_to_tokens([i for i in ids if i not in special]))  # noqa: E731
    rows = [{"prompt": text(q), "response": text(a)} for q, a in zip(prompts.tolist(), responses.tolist(), strict=True)]
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file
