"""What a program in the sandbox gets, and what its caller gets back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.sandbox import Limits, Sandbox

LIMITS = Limits(wall_s=20.0, memory_mb=256, processes=32)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(require="none", limits=LIMITS) as made:
        yield made


def test_a_program_runs_as_python_runs_a_script(sandbox: Sandbox) -> None:
    code = "import sys\nprint(input()[::-1], __name__, sys.argv)\nprint('words', file=sys.stderr)"
    result = sandbox.run(code, stdin="abc\n")
    assert (result.status, result.return_code) == ("finished", 0)
    assert (result.stdout, result.stderr) == ("cba __main__ ['main.py']\n", "words\n")


def test_an_exception_is_told_as_python_tells_it(sandbox: Sandbox) -> None:
    result = sandbox.run("def f():\n    return 1 / 0\nf()")
    assert (result.status, result.return_code) == ("error", 1)
    assert 'File "main.py", line 3, in <module>' in result.stderr
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "verl" not in result.stderr


@pytest.mark.parametrize(("code", "expected"), [("import sys; sys.exit(3)", 3), ("import os; os.abort()", -6)])
def test_the_return_code_is_the_programs(sandbox: Sandbox, code: str, expected: int) -> None:
    result = sandbox.run(code)
    assert (result.status, result.return_code) == ("error", expected)


def test_what_python_does_at_its_end_is_done(sandbox: Sandbox) -> None:
    code = """
import atexit, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.05), print("from a thread"))).start()
"""
    assert sandbox.run(code).stdout == "from a thread\nat exit\n"


def test_a_fork_that_comes_to_the_end_of_the_script_does_not_end_it(sandbox: Sandbox) -> None:
    code = "import os, time\nif os.fork(): time.sleep(0.3); os.wait(); print('parent')\nelse: print('child')"
    assert sandbox.run(code).stdout == "child\nparent\n"


def test_a_fork_that_never_stops_writing_does_not_keep_the_program(sandbox: Sandbox) -> None:
    code = "import os, time\nif os.fork() == 0:\n    while True: os.write(1, b'x' * 4096)\ntime.sleep(0.2)"
    assert sandbox.run(code).status == "output", "nor is it a timeout"


def test_a_program_that_removes_its_directory_has_no_files(sandbox: Sandbox) -> None:
    result = sandbox.run("import os, shutil\nshutil.rmtree(os.getcwd(), True)\nprint('done')", fetch=["main.py"])
    assert (result.status, result.stdout, result.files) == ("finished", "done\n", {})


def test_closing_what_a_program_does_not_know_harms_nothing(sandbox: Sandbox) -> None:
    result = sandbox.run("import os, time\nos.closerange(3, 256)\ntime.sleep(0.2)\nprint('done')\nos._exit(4)")
    assert (result.status, result.return_code, result.stdout) == ("error", 4, "")


def test_programs_share_nothing(sandbox: Sandbox) -> None:
    sandbox.run("import builtins, math; builtins.left = math.left = 1; open('left', 'w').write('x')")
    code = "import builtins, math, os; print(hasattr(builtins, 'left'), hasattr(math, 'left'), os.path.exists('left'))"
    assert sandbox.run(code).stdout == "False False False\n"


def test_random_numbers_differ_and_the_order_of_sets_does_not(sandbox: Sandbox) -> None:
    first, second = (sandbox.run("import random; print(random.random()); print({*'abcdefgh'})") for _ in range(2))
    assert first.stdout.splitlines()[0] != second.stdout.splitlines()[0]
    assert first.stdout.splitlines()[1] == second.stdout.splitlines()[1]


def test_files_go_in_and_come_out(sandbox: Sandbox) -> None:
    code = "data = open('in/a.bin', 'rb').read(); open('out.bin', 'wb').write(data * 2); import helper; print(helper.x)"
    files = {"in/a.bin": b"\x00\xff", "helper.py": b"x = 7"}
    result = sandbox.run(code, files=files, fetch=["out.bin", "in/a.bin", "never written"])
    assert (result.stdout, result.files) == ("7\n", {"out.bin": b"\x00\xff\x00\xff", "in/a.bin": b"\x00\xff"})


@pytest.mark.parametrize("path", ["/etc/passwd", "../out", "a/../../b", ""])
def test_a_path_outside_is_the_callers_mistake(sandbox: Sandbox, path: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(path))):
        sandbox.run("", fetch=[path])


def test_time_ends_a_program_and_what_it_printed_is_kept(sandbox: Sandbox) -> None:
    result = sandbox.run("print('before', flush=True)\nwhile True: pass", limits=Limits(wall_s=0.5))
    assert (result.status, result.stdout) == ("timeout", "before\n")


def test_processor_time_ends_a_program(sandbox: Sandbox) -> None:
    assert sandbox.run("while True: pass", limits=Limits(wall_s=60.0, cpu_s=1)).status == "timeout"


def test_memory_of_its_own_and_memory_it_is_killed_for_are_told_apart(sandbox: Sandbox) -> None:
    itself = sandbox.run("x = bytearray(1 << 30)")
    assert (itself.status, itself.return_code) == ("memory", 1)
    assert itself.stderr.endswith("MemoryError\n")
    many = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        x = b"x" * (100 << 20); time.sleep(30)
os.wait()
"""
    killed = sandbox.run(many)
    assert (killed.status, killed.return_code) == ("memory", -9)
    assert "more than 256 MB of memory" in killed.stderr


def test_memory_that_forks_share_counts_once(sandbox: Sandbox) -> None:
    code = """
import os, time
x = b'x' * (100 << 20)
for _ in range(4):
    if os.fork() == 0:
        time.sleep(0.5); os._exit(0)
for _ in range(4): os.wait()
print("done")
"""
    assert sandbox.run(code).stdout == "done\n"


def test_output_is_cut_and_the_program_goes_on(sandbox: Sandbox) -> None:
    code = "import sys\nprint('x' * 5_000_000)\nopen('done', 'w').write('yes')"
    result = sandbox.run(code, fetch=["done"], limits=Limits(output_bytes=1000))
    assert (result.status, result.stdout, result.files) == ("output", "x" * 1000, {"done": b"yes"})


@pytest.mark.parametrize(
    ("language", "code", "expected"),
    [
        ("shell", "read x; echo $x | tr a-c A-C", "ABC\n"),
        ("cpp", "#include <iostream>\nint main() { std::string x; std::cin >> x; std::cout << x << 1; }", "abc1"),
        ("javascript", "console.log(require('fs').readFileSync(0, 'utf8').trim() + 2)", "abc2\n"),
    ],
)
def test_other_languages(sandbox: Sandbox, language: str, code: str, expected: str) -> None:
    result = sandbox.run(code, language, stdin="abc\n")
    if result.status == "refused":
        pytest.skip(result.stderr)
    assert (result.status, result.stdout) == ("finished", expected), result


def test_what_does_not_compile_says_so(sandbox: Sandbox) -> None:
    result = sandbox.run("int main() { return x; }", "cpp")
    if result.status == "refused":
        pytest.skip(result.stderr)
    assert (result.status, result.return_code) == ("error", None)
    assert result.compile is not None
    assert "was not declared" in result.compile.stderr


def test_a_language_that_is_not_there_is_refused_in_words(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "'cobol' is not one of python" in sandbox.run("", "cobol").stderr
    monkeypatch.setenv("PATH", "/nowhere")
    result = sandbox.run("int main() {}", "cpp")
    assert (result.status, result.stderr) == (
        "refused",
        "language 'cpp' needs g++, which is not on this machine's PATH",
    )


def test_submitted_programs_run_at_once(sandbox: Sandbox) -> None:
    futures = [sandbox.submit(f"print({number} ** 2)") for number in range(6)]
    assert [future.result().stdout for future in futures] == [f"{number**2}\n" for number in range(6)]


def test_text_that_is_no_text_is_the_programs_mistake(sandbox: Sandbox) -> None:
    result = sandbox.run("print('\ud800')", stdin="\udfff")
    assert (result.status, "SyntaxError" in result.stderr) == ("error", True)


def test_other_folders_are_readable_if_the_caller_says_so(sandbox: Sandbox, tmp_path: Path) -> None:
    if not sandbox.isolation.namespaces:
        pytest.skip("no namespaces here; without, the folders above would have to be open to others")
    tmp_path.chmod(0o755)
    (tmp_path / "data").write_text("read me")
    code = f"print(open({str(tmp_path / 'data')!r}).read())"
    assert sandbox.run(code).status == "error"
    with Sandbox(require="none", read=[str(tmp_path)], warm=0) as reading:
        assert reading.run(code).stdout == "read me\n"
        assert reading.run(code.replace(").read", ", 'w').write")).status == "error"


def test_a_closed_sandbox_says_so() -> None:
    sandbox = Sandbox(require="none")
    sandbox.close()
    with pytest.raises(RuntimeError, match="closed"):
        sandbox.run("print(1)")
