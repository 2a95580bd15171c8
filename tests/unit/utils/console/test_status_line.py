"""The status line: other output appears above it, it fits the terminal, and nothing of it remains."""

import io
import threading

import pytest

from verl.utils.console import StatusLine, cut_to_width

CLEAR = "\r\x1b[2K"


class Terminal(io.StringIO):
    closed_terminal = False

    def isatty(self) -> bool:
        return not self.closed_terminal


def test_output_clears_the_line_and_it_is_drawn_again():
    terminal = Terminal()
    line = StatusLine(terminal)
    out = line.above(terminal)
    out.write("before\n")
    line.show("working")
    out.write("a log line\n")
    line.close()
    out.write("after\n")
    assert terminal.getvalue() == f"before\n{CLEAR}working{CLEAR}a log line\nworking{CLEAR}after\n"


def test_an_unfinished_line_is_not_overwritten():
    terminal = Terminal()
    line = StatusLine(terminal)
    out = line.above(terminal)
    line.show("working")
    out.write("downloading 10%")
    line.show("still working")
    out.write("\rdownloading 20%\n")
    assert terminal.getvalue() == f"{CLEAR}working{CLEAR}downloading 10%\rdownloading 20%\nstill working"


def test_after_the_terminal_is_closed_nothing_is_drawn():
    terminal = Terminal()
    line = StatusLine(terminal)
    line.show("working")
    terminal.closed_terminal = True
    line.above(terminal).write("a log line\n")
    line.show("working")
    line.close()
    assert terminal.getvalue() == f"{CLEAR}workinga log line\n"


def test_concurrent_lines_stay_whole():
    terminal = Terminal()
    line = StatusLine(terminal)

    def write(name: str) -> None:
        out = line.above(terminal)
        for number in range(200):
            out.write(f"{name} {number}\n")
            line.show(f"{name} works")

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    line.close()
    rows = [row.rpartition(CLEAR)[2] for row in terminal.getvalue().split("\n")]
    assert sorted(rows) == sorted(["", *(f"{name} {number}" for name in "abc" for number in range(200))])


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [
        ("step 3/40", 9, "step 3/40"),
        ("step 3/40", 8, "step 3/…"),
        ("数据检查", 8, "数据检查"),
        ("数据检查", 7, "数据检…"),
        ("数据检查", 6, "数据…"),
        ("abc", 0, ""),
    ],
)
def test_the_text_fits_the_width(text, columns, shown):
    assert cut_to_width(text, columns) == shown
