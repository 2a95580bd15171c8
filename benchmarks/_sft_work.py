"""The rows of supervised steps that every system gets: seeded lengths, a quarter of each row a prompt."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from _shapes import shape_config, write_model

from verl.utils.balancing import SequenceCost

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.tiny import tiny_tokenizer

_TEMPLATE = 4  # tokens that the chat template adds to a row: two roles, two ends
_SHORTEST = 16


@dataclass(frozen=True)
class SFTWork:
    """`rows` a step of about `mean` tokens (lognormal, none above `longest`); others pack them to `packed` tokens."""

    shape: str
    rows: int
    mean: int
    longest: int
    packed: int
    steps: int
    seed: int = 7

    def lengths(self) -> np.ndarray:
        """[steps × rows]: tokens of every row."""
        return _lengths(self)

    def mean_tokens(self) -> float:
        """Tokens of a step."""
        return float(self.lengths().sum()) / self.steps

    def update_flops_per_token(self) -> float:
        """What an update needs at least: no padding, no recomputation, the vocabulary only where a token is learned."""
        lengths = self.lengths()
        answers = lengths - lengths // 4
        forward = SequenceCost.from_config(self.model_config().to_dict())(lengths, answers).sum()
        return float(3 * forward / lengths.sum())

    def title(self) -> str:
        lengths = self.lengths()
        return (
            f"{self.shape}, {self.rows} rows a step, mean {lengths.mean():.0f}, max {lengths.max()} tokens, "
            f"{self.mean_tokens():.0f} tokens a step"
        )

    def model_config(self) -> Any:
        return shape_config(self.shape, pad_token_id=0, eos_token_id=1, bos_token_id=None)

    def write(self, folder: Path) -> Path:
        """Model, tokenizer and rows under `folder`: as text for ours, as tokens (the same) for TRL."""
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder / "model", self.model_config())
        self._write_rows(folder / "rows.parquet")
        (folder / "work.json").write_text(json.dumps(asdict(self)))
        return folder

    def _write_rows(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        tokenizer, draw, rows = tiny_tokenizer(), np.random.default_rng(self.seed), []
        for length in self.lengths():
            # The tokenizer makes a token of every character.
            text = "".join(map(chr, draw.integers(97, 123, length - _TEMPLATE)))
            cut = int(length) // 4
            prompt, response = text[:cut], text[cut:]
            before = tokenizer(f"<|user|>{prompt}<|end|><|assistant|>")["input_ids"]
            after = tokenizer(f"{response}<|end|>")["input_ids"]
            mask = [0] * len(before) + [1] * len(after)
            rows.append({"prompt": prompt, "response": response, "input_ids": before + after, "completion_mask": mask})
        pq.write_table(pa.Table.from_pylist(rows), path)


@cache
def _lengths(work: SFTWork) -> np.ndarray:
    shares = np.random.default_rng(work.seed).lognormal(0.0, 0.8, work.steps * work.rows)
    lengths = shares / shares.mean() * work.mean
    return np.clip(np.rint(lengths), _SHORTEST, work.longest).astype(np.int64)


def read_work(folder: Path) -> SFTWork:
    """What `write` has written."""
    return SFTWork(**json.loads((folder / "work.json").read_text()))
