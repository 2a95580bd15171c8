"""Training curves without a plotting library: a PNG drawn with numpy, and the same curves as text for a terminal.

    python examples/plot.py runs/PROJECT/EXPERIMENT/metrics.jsonl --key val/SOURCE/accuracy reward/mean --png curve.png

At most two keys, with values between 0 and 1. `trainer.logger=[console,file]` writes the metrics.
"""

from __future__ import annotations

import argparse
import itertools
import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

INK, GRID = (60, 60, 70), (225, 225, 230)
COLOURS = ((0, 110, 200), (240, 150, 60))
MARKS = "●·"
# 3 × 5 pixels, a row per octal digit.
GLYPHS = dict(
    zip(
        "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ%.-():/ ",
        [
            "75557",
            "26227",
            "71747",
            "71717",
            "55711",
            "74717",
            "74757",
            "71222",
            "75757",
            "75717",
            "25755",
            "65656",
            "34443",
            "65556",
            "74647",
            "74644",
            "34553",
            "55755",
            "72227",
            "11152",
            "55655",
            "44447",
            "57755",
            "65555",
            "25552",
            "65644",
            "25573",
            "65655",
            "34216",
            "72222",
            "55557",
            "55552",
            "55775",
            "55255",
            "55222",
            "71247",
            "51245",
            "00002",
            "00700",
            "24442",
            "42224",
            "02020",
            "11244",
            "00000",
        ],
        strict=True,
    )
)


@dataclass(frozen=True)
class Line:
    """A named curve: (step, value between 0 and 1) in the order of the steps."""

    name: str
    points: Sequence[tuple[float, float]]


def read_line(metrics: Path, key: str, name: str) -> Line:
    """The curve of one metric in the `metrics.jsonl` of a run."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines() if line.strip()]
    return Line(name, [(record["step"], float(record["data"][key])) for record in records if key in record["data"]])


def text_chart(lines: Sequence[Line], width: int = 64, height: int = 14) -> str:
    """Lines as characters, values from 0 % at the bottom to 100 % at the top."""
    last = max(step for line in lines for step, _ in line.points) or 1
    cells = [[" "] * width for _ in range(height)]
    for line, mark in reversed(list(zip(lines, MARKS, strict=False))):  # the first line ends up on top
        for column in range(width):
            value = _value_at(line, column / (width - 1) * last)
            if value is not None:
                cells[round((1 - value) * (height - 1))][column] = mark
    rows = [f"{100 * (1 - row / (height - 1)):4.0f}% │{''.join(cells[row])}" for row in range(height)]
    legend = "   ".join(f"{mark} {line.name}" for line, mark in zip(lines, MARKS, strict=False))
    axis = f"      0{'step'.center(width - 1 - len(str(round(last))))}{round(last)}"
    return "\n".join([*rows, "      └" + "─" * width, axis, "      " + legend])


def write_png(path: Path, title: str, lines: Sequence[Line], width: int = 960, height: int = 540) -> Path:
    """The chart as an image; values from 0 % to 100 %."""
    image = np.full((height, width, 3), 255.0)
    left, right, top, bottom = 90, width - 40, 90, height - 70
    last = max(step for line in lines for step, _ in line.points) or 1

    def to_pixel(step: float, value: float) -> tuple[float, float]:
        return left + (right - left) * step / last, bottom - (bottom - top) * min(max(value, 0.0), 1.0)

    for tick in range(6):
        y = to_pixel(0, tick / 5)[1]
        _segment(image, (left, y), (right, y), GRID, 1)
        _text(image, f"{20 * tick}%", (left - 60, y - 7), INK, 3)
        x = to_pixel(last * tick / 5, 0)[0]
        _text(image, f"{round(last * tick / 5)}", (x - 8, bottom + 14), INK, 3)
    _text(image, "STEP", ((left + right) / 2 - 20, height - 30), INK, 3)
    _text(image, title.upper(), (left, 24), INK, 4)
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        _text(image, line.name.upper(), (left + 24 + number * 380, 60), colour, 3)
        _segment(image, (left + number * 380, 67), (left + 14 + number * 380, 67), colour, 4)
    for number, line in reversed(list(enumerate(lines))):
        pixels = [to_pixel(*point) for point in line.points]
        for start, end in itertools.pairwise(pixels):
            _segment(image, start, end, COLOURS[number % len(COLOURS)], 3 if number == 0 else 1.5)
    path.write_bytes(_png(image.round().astype(np.uint8)))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path, help="the metrics.jsonl of a run")
    parser.add_argument("--key", nargs="+", required=True, help="one or two metrics")
    parser.add_argument("--title", default="", help="default: name of the run's folder")
    parser.add_argument("--png", type=Path, help="default: curve.png next to the metrics")
    options = parser.parse_args()
    lines = [read_line(options.metrics, key, key) for key in options.key[: len(COLOURS)]]
    empty = [line.name for line in lines if not line.points]
    if empty:
        raise SystemExit(f"{options.metrics} has no values of {', '.join(empty)}. Check --key.")
    print(text_chart(lines))
    for line in lines:
        print(f"{line.name}: {line.points[0][1]:.1%} at step {line.points[0][0]}, {line.points[-1][1]:.1%} at the end")
    folder = options.metrics.parent
    print(write_png(options.png or folder / "curve.png", options.title or folder.name, lines))


def _value_at(line: Line, step: float) -> float | None:
    """Linear between points; None outside of them."""
    steps, values = [point[0] for point in line.points], [point[1] for point in line.points]
    if not steps or not steps[0] <= step <= steps[-1]:
        return None
    return min(max(float(np.interp(step, steps, values)), 0.0), 1.0)


def _segment(
    image: np.ndarray, start: tuple[float, float], end: tuple[float, float], colour: Sequence[int], thickness: float
) -> None:
    """Draw an anti-aliased line: the colour of a pixel depends on its distance from the segment."""
    reach = thickness / 2 + 1
    x0, x1 = int(min(start[0], end[0]) - reach), int(max(start[0], end[0]) + reach) + 1
    y0, y1 = int(min(start[1], end[1]) - reach), int(max(start[1], end[1]) + reach) + 1
    y, x = np.mgrid[y0:y1, x0:x1]
    dx, dy = end[0] - start[0], end[1] - start[1]
    along = ((x - start[0]) * dx + (y - start[1]) * dy) / max(dx * dx + dy * dy, 1e-9)
    along = along.clip(0, 1)
    distance = np.hypot(x - start[0] - along * dx, y - start[1] - along * dy)
    cover = (thickness / 2 + 0.5 - distance).clip(0, 1)[..., None]
    image[y0:y1, x0:x1] = image[y0:y1, x0:x1] * (1 - cover) + np.array(colour) * cover


def _text(image: np.ndarray, text: str, corner: tuple[float, float], colour: Sequence[int], scale: int) -> None:
    left, top = int(corner[0]), int(corner[1])
    for number, character in enumerate(text):
        for row, bits in enumerate(GLYPHS.get(character, GLYPHS["-"])):
            for column in range(3):
                if int(bits, 8) >> (2 - column) & 1:
                    y, x = top + row * scale, left + (number * 4 + column) * scale
                    image[y : y + scale, x : x + scale] = colour


def _png(pixels: np.ndarray) -> bytes:
    """[height, width, 3] uint8 as a PNG file."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
        + chunk(b"IEND", b"")
    )


if __name__ == "__main__":
    main()
