"""The figure of docs/concepts/batch_sizes.md: one training step from prompts to optimizer steps, as SVG.

python docs/scripts/batch_sizes.py docs/figures/batch_sizes.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

PROMPTS, RESPONSES, RANKS, MINI, MICRO = 8, 4, 2, 4, 4
WIDTH, HEIGHT, LEFT = 750, 430, 200
CELL, GAP, COLUMN = 13, 3, 290
# Readable on light and dark pages.
TEXT, LINE = "#808080", "#80808088"
COLOURS = ("#3f51b5", "#ef6c00", "#2e7d32", "#8e24aa", "#00838f", "#c62828", "#6d4c41", "#9e9d24")


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{TEXT}" text-anchor="{anchor}">{words}</text>'


def cell(x: float, y: float, prompt: int) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{CELL}" height="{CELL}" rx="2" fill="{COLOURS[prompt]}"/>'


def frame(x: float, y: float, width: float, height: float, style: str = "") -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="none" stroke="{LINE}" {style}/>'
    )


def label(y: float, title: str, key: str) -> list[str]:
    return [text(8, y, title), text(8, y + 15, key, size=10)]


def draw() -> str:
    """Four lines: prompts, samples, mini-batches on ranks, micro-batches."""
    step = CELL + GAP
    parts = label(40, f"{PROMPTS} prompts", "data.train_batch_size")
    parts += [cell(LEFT + 8 + prompt * 68 + 1.5 * step, 30, prompt) for prompt in range(PROMPTS)]

    parts += label(90, f"× {RESPONSES} responses", "rollout.n")
    for prompt in range(PROMPTS):
        x = LEFT + 8 + prompt * 68
        parts.append(frame(x - 4, 76, RESPONSES * step + 5, CELL + 8))
        parts += [cell(x + i * step, 80, prompt) for i in range(RESPONSES)]
    parts.append(text(LEFT + 8, 118, f"one group per prompt; {PROMPTS * RESPONSES} samples in the batch", size=11))

    parts += label(158, f"mini-batches of {MINI} prompts", "actor.ppo_mini_batch_size")
    parts.append(text(8, 218, f"{RANKS} ranks"))
    parts.append(text(8, 290, f"micro-batches of {MICRO}"))
    parts.append(text(8, 305, "actor.ppo_micro_batch_size_per_gpu", size=9))
    for number in range(PROMPTS // MINI):
        x = LEFT + number * COLUMN
        parts.append(frame(x, 140, COLUMN - 14, 240))
        parts.append(
            text(x + (COLUMN - 14) / 2, 160, f"mini-batch {number + 1}: {MINI * RESPONSES} samples", 12, "middle")
        )
        for rank in range(RANKS):
            parts += _rank(x + 10 + rank * 132, number, rank)
        parts.append(text(x + (COLUMN - 14) / 2, 370, f"= optimizer step {number + 1}", 12, "middle"))
    parts.append(
        text(LEFT, 408, "micro-batches add up gradients: they change memory and speed, not the result", size=12)
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 40} {HEIGHT}" font-family="sans-serif" '
        f'role="img" aria-label="Prompts, responses, mini-batches, ranks and micro-batches">\n{body}\n</svg>\n'
    )


def _rank(x: float, mini_batch: int, rank: int) -> list[str]:
    """The samples of one rank, one frame per micro-batch."""
    step = CELL + GAP
    per_rank = MINI * RESPONSES // RANKS
    first = mini_batch * MINI + rank * (per_rank // RESPONSES)
    parts = [frame(x, 172, 124, 170, 'stroke-dasharray="4 3"'), text(x + 62, 190, f"rank {rank}", 12, "middle")]
    for number in range(per_rank // MICRO):
        y = 204 + number * 64
        parts.append(frame(x + 24, y, RESPONSES * step + 9, 46))
        parts += [cell(x + 30 + i * step, y + 6, first + number) for i in range(MICRO)]
        parts.append(text(x + 62, y + 38, "one pass", 10, "middle"))
    return parts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("svg", type=Path, help="the file to write")
    parser.parse_args().svg.write_text(draw())
