"""Learning curves as SVG from the metrics of runs, without a plotting library.

    python docs/scripts/figures.py docs/figures/quickstart.svg --title "make train" --key val/accuracy \
        PPO=runs/quickstart/ppo/metrics.jsonl GRPO=runs/quickstart/grpo/metrics.jsonl

Each argument is LABEL=FILE, a file of `trainer.logger=[file]`. Values are shares between 0 and 1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 120, 40, 44
COLOURS = ("#3f51b5", "#ef6c00", "#2e7d32", "#8e24aa")
# Readable on light and dark pages.
TEXT, GRID = "#808080", "#80808055"
Curve = Sequence[tuple[float, float]]


def read_curve(path: Path, key: str) -> list[tuple[float, float]]:
    """(step, value) of the steps that have the metric `key`, or one whose name ends with `/` and `key`."""
    curve = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        metrics = row["data"]
        names = [name for name in metrics if name == key or name.endswith(f"/{key}")]
        if names:
            curve.append((row["step"], metrics[names[0]]))
    if not curve:
        raise SystemExit(f"{path}: no step has a metric {key}.")
    return curve


def draw(curves: dict[str, Curve], title: str) -> str:
    """The SVG file of the curves: steps on the x axis, per cent on the y axis."""
    last_step = max(step for curve in curves.values() for step, _ in curve)

    def x(step: float) -> float:
        return round(LEFT + step / last_step * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - value * (HEIGHT - TOP - BOTTOM), 1)

    def text(px: float, py: float, content: str, anchor: str = "middle", colour: str = TEXT) -> str:
        return f'<text x="{px}" y="{py}" text-anchor="{anchor}" fill="{colour}">{escape(content)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="13">',
        text(LEFT, 22, title, "start"),
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<path d="M{LEFT} {y(share)}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        parts.append(text(LEFT - 8, y(share) + 4, f"{share:.0%}", "end"))
    for quarter in range(5):
        step = last_step * quarter / 4
        parts.append(text(x(step), HEIGHT - 22, f"{step:g}"))
    parts.append(text(x(last_step / 2), HEIGHT - 4, "step"))
    for colour, curve in zip(COLOURS, curves.values(), strict=False):
        points = " ".join(f"{x(step)},{y(value)}" for step, value in curve)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
    # Labels at the right end, moved apart where curves end close to each other.
    ends = sorted((y(curve[-1][1]), index) for index, curve in enumerate(curves.values()))
    labels = list(curves)
    previous = float("-inf")
    for end, index in ends:
        previous = max(end, previous + 16)
        value = curves[labels[index]][-1][1]
        parts.append(text(WIDTH - RIGHT + 8, previous + 4, f"{labels[index]} {value:.0%}", "start", COLOURS[index]))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("svg", type=Path, help="the file to write")
    parser.add_argument("--title", required=True)
    parser.add_argument("--key", required=True, help="the metric, or the end of its name")
    parser.add_argument("runs", nargs="+", metavar="LABEL=FILE")
    options = parser.parse_args()
    files = dict(run.split("=", 1) for run in options.runs)
    curves = {label: read_curve(Path(file), options.key) for label, file in files.items()}
    options.svg.write_text(draw(curves, options.title))


if __name__ == "__main__":
    main()
