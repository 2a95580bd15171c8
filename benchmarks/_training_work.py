"""The workload of a training step, the same for every system: prompts, and a seeded length for every response.

A random model does not stop by itself, so the length of every response is set here: by `max_new_tokens` of the row in
verl, by forcing the end token at this position in other systems.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _shapes import shape_config, write_model

from verl.utils.balancing import SequenceCost

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

REWARD_FILE = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """A different number for every response, at the cost of a typical rule."""
    return (sum(map(ord, solution_str[:256])) + 7 * len(solution_str)) % 1000 / 1000
'''


@dataclass(frozen=True)
class Work:
    """`prompts` × `n` responses per step: `mean` tokens each, or ragged up to `longest` if that is larger."""

    case: str
    shape: str
    prompts: int
    n: int
    prompt_length: int
    mean: int
    longest: int
    steps: int
    seed: int = 7

    @property
    def samples(self) -> int:
        return self.prompts * self.n

    @property
    def sequence(self) -> int:
        """Maximum tokens of a sequence."""
        return self.prompt_length + self.longest

    def lengths(self, step: int) -> np.ndarray:
        """[prompts, n]: tokens of every response of a step; mean and, if ragged, maximum are exact."""
        if self.longest == self.mean:
            return np.full((self.prompts, self.n), self.mean)
        rng = np.random.default_rng([self.seed, step])
        shares = rng.lognormal(0.0, 1.0, self.samples)
        shares[int(shares.argmax())] = 1e9  # one response reaches the limit
        scale = _scale_to_mean(shares, self.mean, self.longest)
        return np.clip(np.rint(shares * scale), 1, self.longest).astype(np.int64).reshape(self.prompts, self.n)

    def tokens(self, step: int) -> int:
        """Prompt and response tokens of a step."""
        return self.samples * self.prompt_length + int(self.lengths(step).sum())

    def forward_flops(self, step: int, shared_prompts: bool = False) -> float:
        """FLOPs of a forward pass over a step that every row alone requires; an update needs three times as many.

        Without padding and recomputation, logits only for sampled tokens, causal attention within each sequence.
        `shared_prompts`: the FLOPs that remain if each prompt is computed once.
        """
        cost, responses = SequenceCost.from_config(self.model_config().to_dict()), self.lengths(step).ravel()
        repeated = self.samples - self.prompts if shared_prompts else 0
        return float(cost(self.prompt_length + responses, responses).sum() - repeated * cost(self.prompt_length))

    def title(self) -> str:
        lengths = np.concatenate([self.lengths(step).ravel() for step in range(1, self.steps)] or [self.lengths(0)])
        kind = (
            str(self.mean) if self.longest == self.mean else f"ragged, mean {lengths.mean():.0f}, max {lengths.max()}"
        )
        return f"({self.case}) {self.shape}, {self.prompts} × {self.n} responses, {self.prompt_length} + {kind} tokens"

    def model_config(self) -> Any:
        return shape_config(self.shape, pad_token_id=0, eos_token_id=1, bos_token_id=None)

    def write(self, folder: Path) -> Path:
        """Write model, tokenizer, prompts with their response lengths and a reward function to `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder / "model", self.model_config())
        (folder / "reward.py").write_text(REWARD_FILE)
        self._write_prompts(folder / f"{self.case}.parquet")
        (folder / f"{self.case}.json").write_text(json.dumps(asdict(self)))
        return folder

    def _write_prompts(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        # The tokenizer encodes every character as one token; the chat template adds three.
        rows = [
            {
                "data_source": "random",
                "prompt": [{"role": "user", "content": f"{number:08d}".ljust(self.prompt_length - 3, "x")}],
                "reward_model": {"style": "rule", "ground_truth": str(number)},
                "extra_info": {"index": number},
                "max_new_tokens": self.lengths(step)[row].tolist(),
            }
            for step in range(self.steps)
            for row, number in enumerate(range(step * self.prompts, (step + 1) * self.prompts))
        ]
        pq.write_table(pa.Table.from_pylist(rows), path)


def read_work(folder: Path, case: str) -> Work:
    """Read the workload of a case from a folder written by `Work.write`."""
    return Work(**json.loads((folder / f"{case}.json").read_text()))


def _scale_to_mean(shares: np.ndarray, mean: int, longest: int) -> float:
    """The factor with which `shares`, clipped to [1, `longest`], have this mean."""
    low, high = 0.0, float(longest)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(shares * middle, 1, longest).mean() < mean else (low, middle)
    return high
