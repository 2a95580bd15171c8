"""Valid and wrong solutions with their tests in the styles of MBPP and HumanEval, and their expected score."""
# ruff: noqa: E501 - programs are kept as they are

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    name: str
    program: str
    ground_truth: Any
    score: float = 1.0
    forgeable: int = 0
    """Expected `forgeable` of the result: 1 if a test has to be executed in the process of the solution."""

    def __str__(self) -> str:
        return self.name

    @property
    def answer(self) -> str:
        return f"```python\n{self.program}\n```"


def _mbpp(*asserts: str, setup: str = "", imports: list[str] | None = None) -> dict[str, Any]:
    return {"test_list": list(asserts), "test_setup_code": setup, "test_imports": imports or []}


def _check(body: str, entry_point: str, prompt: str = "") -> dict[str, Any]:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    truth = {"test": f"METADATA = {{}}\n\ndef check(candidate):\n{lines}\n", "entry_point": entry_point}
    return {**truth, "prompt": prompt} if prompt else truth


CASES = [
    # -- plain functions
    Case("function", "def add(a, b):\n    return a + b", _mbpp("assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'")),
    Case("half", "def dbl(a):\n    return a + 1", _mbpp("assert dbl(1) == 2", "assert dbl(2) == 4"), 0.5),
    Case("wrong", "def dbl(a):\n    return a", _mbpp("assert dbl(1) == 2", "assert dbl(2) == 4"), 0.0),
    Case("missing", "def other(a):\n    return a", _mbpp("assert dbl(1) == 2"), 0.0),
    Case("keywords", "def f(a, *rest, b=2, **more):\n    return a + b + sum(rest) + sum(more.values())",
         _mbpp("assert f(1, 1, b=3, c=4) == 9")),
    Case("tuples", "def f(xs):\n    return tuple(sorted(xs)), set(xs), frozenset(xs)",
         _mbpp("assert f([3, 1]) == ((1, 3), {1, 3}, frozenset({3, 1}))")),
    Case("dicts", "def f(s):\n    return Counter(s)", _mbpp("assert f('aab') == {'a': 2, 'b': 1}",
         "assert f('aab') == Counter('aba')", "assert f('aab').most_common(1) == [('a', 2)]")),
    Case("defaultdict", "def f(xs):\n    d = defaultdict(list)\n    for x in xs: d[x % 2].append(x)\n    return d",
         _mbpp("assert f([1, 2, 3]) == {1: [1, 3], 0: [2]}", "assert f([1])[5] == []")),
    Case("floats", "def f(x):\n    return x / 3, -0.0, float('inf'), float('nan')",
         _mbpp("assert abs(f(1)[0] - 0.333333) < 1e-5", "import math\nassert math.isclose(f(2)[0], 2 / 3)",
               "assert f(1)[2] > 10**300 and f(1)[3] != f(1)[3] and str(f(1)[1]) == '-0.0'")),
    Case("big-integers", "def f(n):\n    return 7 ** n", _mbpp("assert f(1000) == 7 ** 1000", "assert f(9000) % 10 == 1")),
    Case("decimals", "from decimal import Decimal\nfrom fractions import Fraction\ndef f(x):\n"
         "    return Decimal(x) / 8, Fraction(1, 3)",
         _mbpp("from decimal import Decimal\nfrom fractions import Fraction\n"
               "assert f('1') == (Decimal('0.125'), Fraction(2, 6))")),
    Case("dates", "from datetime import date, timedelta\ndef f(d):\n    return d + timedelta(days=1)",
         _mbpp("import datetime\nassert f(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)",
               "assert f(date(2024, 1, 1)) == date(2024, 1, 2)")),
    Case("bytes", "def f(b):\n    return bytes(reversed(b)), bytearray(b)",
         _mbpp("assert f(b'\\x00\\xff') == (b'\\xff\\x00', bytearray(b'\\x00\\xff'))")),
    Case("complex", "def f(z):\n    return z.conjugate()", _mbpp("assert f(1+2j) == 1-2j")),
    Case("types", "def f(x):\n    return type(x)", _mbpp("assert f(1) == int", "assert f([]) is list")),
    Case("none", "def f(x):\n    return None", _mbpp("assert f(1) is None", "assert not f(1)")),
    Case("views", "def f(d):\n    return d.keys()", _mbpp("assert f({'a': 1}) == {'a'}", "assert list(f({'b': 1})) == ['b']")),
    Case("named-tuple", "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(a):\n    return P(a, 2)",
         _mbpp("assert f(1) == (1, 2)", "assert f(1).x == 1", "x, y = f(5)\nassert x == 5")),
    Case("int-enum", "import enum\nclass C(enum.IntEnum):\n    A = 3\ndef f():\n    return C.A", _mbpp("assert f() == 3")),
    Case("builtin-name", "def sum(a, b):\n    return a * b", _mbpp("assert sum(10, 15) == 150")),
    Case("prelude-name", "def gcd(a, b):\n    return a if b == 0 else gcd(b, a % b)", _mbpp("assert gcd(12, 18) == 6")),
    Case("wrapped", "def f(x):\n    return iter(x[::-1])", _mbpp("assert list(f([1, 2])) == [2, 1]", "assert set(f([1])) == {1}")),
    Case("recursion", "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)", _mbpp("assert fib(15) == 610")),
    Case("deep-recursion", "import sys\nsys.setrecursionlimit(10000)\ndef f(n):\n    return 0 if n == 0 else 1 + f(n - 1)",
         _mbpp("assert f(3000) == 3000")),
    Case("prints", "def f(x):\n    print('hello', x)\n    return x",
         _mbpp("assert f(1) == 1", "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n"
               "    f(7)\nassert out.getvalue() == 'hello 7\\n'")),
    Case("main-guard", "def f(x):\n    return x\nif __name__ == '__main__':\n    input()", _mbpp("assert f(1) == 1")),
    Case("numpy", "import numpy as np\ndef f(x):\n    return np.array(x) * 2, np.float64(1.5)",
         _mbpp("import numpy as np\nassert np.array_equal(f([1, 2])[0], [2, 4]) and f([1])[1] == 1.5",
               "assert np.allclose(f([1.0])[0], np.array([2.0]))")),
    # -- arguments
    Case("sorted-in-place", "def f(xs):\n    xs.sort()", _mbpp("xs = [3, 1, 2]\nf(xs)\nassert xs == [1, 2, 3]")),
    Case("nested-mutation", "def f(m):\n    for row in m: row.reverse()\n    m.append([])\n    return m",
         _mbpp("m = [[1, 2], [3, 4]]\nrow = m[0]\nassert f(m) is m\nassert m == [[2, 1], [4, 3], []] and row is m[0]")),
    Case("dict-mutation", "def f(d, s):\n    d['b'] = d.pop('a')\n    s.add(9)",
         _mbpp("d, s = {'a': [1]}, {1}\nf(d, s)\nassert d == {'b': [1]} and s == {1, 9}")),
    Case("shared-arguments", "def f(m):\n    m[0].append(1)\n    return m", _mbpp("r = []\nassert f([r, r]) == [[1], [1]]\nassert r == [1]")),
    Case("no-mutation", "def f(xs):\n    xs = sorted(xs)\n    return xs", _mbpp("xs = [2, 1]\nassert f(xs) == [1, 2] and xs == [2, 1]")),
    Case("callback", "def f(g, xs):\n    return [g(x) for x in xs]",
         _mbpp("assert f(lambda x: x * 2, [1, 2]) == [2, 4]", "assert f(str, [1]) == ['1']", "assert f(len, ['ab']) == [2]")),
    Case("callback-errors", "def f(g):\n    try:\n        return g()\n    except ZeroDivisionError:\n        return 'zero'",
         _mbpp("assert f(lambda: 1 / 0) == 'zero'")),
    Case("decorator", "import functools\ndef twice(g):\n    @functools.wraps(g)\n    def inner(*a):\n        return g(g(*a))\n    return inner",
         _mbpp("@twice\ndef inc(x):\n    return x + 1\nassert inc(1) == 3 and inc.__name__ == 'inc'")),
    Case("closures", "def adder(n):\n    def add(x):\n        return x + n\n    return add",
         _mbpp("assert adder(3)(4) == 7", "a = adder(1)\nassert a(1) == 2 and callable(a)")),
    Case("counter-closure", "def counter():\n    n = 0\n    def step():\n        nonlocal n\n        n += 1\n        return n\n    return step",
         _mbpp("c = counter()\nassert (c(), c(), counter()()) == (1, 2, 1)")),
    Case("function-argument", "def sq(x):\n    return x * x\ndef ap(g, x):\n    return g(x)", _mbpp("assert ap(sq, 3) == 9")),
    Case("name", "def f(x):\n    'doc'\n    return x", _mbpp("assert f.__name__ == 'f' and f.__doc__ == 'doc' and f(1) == 1")),
    # -- generators and exceptions
    Case("generator", "def f(n):\n    for i in range(n):\n        yield i * i",
         _mbpp("assert list(f(4)) == [0, 1, 4, 9]", "g = f(2)\nassert next(g) == 0 and next(g) == 1 and next(g, None) is None",
               "assert sum(f(4)) == 14 and max(f(3)) == 4 and 4 in f(3)")),
    Case("infinite-generator", "def f():\n    n = 0\n    while True:\n        yield n\n        n += 1",
         _mbpp("import itertools\nassert list(itertools.islice(f(), 3)) == [0, 1, 2]")),
    Case("send", "def f():\n    total = 0\n    while True:\n        x = yield total\n        total += x",
         _mbpp("g = f()\nnext(g)\nassert g.send(3) == 3 and g.send(4) == 7\ng.close()")),
    Case("map", "def f(xs):\n    return map(str, xs)", _mbpp("assert list(f([1, 2])) == ['1', '2']", "assert ''.join(f([1])) == '1'")),
    Case("raises", "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x",
         _mbpp("try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'negative'", "assert f(1) == 1")),
    Case("does-not-raise", "def f(x):\n    return x", _mbpp("try:\n    f(-1)\n    assert False, 'no error'\nexcept ValueError:\n    pass"), 0.0),
    Case("own-exception", "class TooLow(ValueError):\n    def __init__(self, n):\n        super().__init__(f'low {n}')\n        self.n = n\n"
         "def f(x):\n    raise TooLow(x)",
         _mbpp("try:\n    f(3)\n    assert False\nexcept TooLow as e:\n    assert e.n == 3 and str(e) == 'low 3'",
               "try:\n    f(3)\n    assert False\nexcept ValueError as e:\n    assert type(e).__name__ == 'TooLow'")),
    Case("library-exception", "import json\ndef f(x):\n    return json.loads(x)",
         _mbpp("import json\ntry:\n    f('{')\n    assert False\nexcept json.JSONDecodeError:\n    pass")),
    Case("context", "import contextlib\n@contextlib.contextmanager\ndef tag(log):\n    log.append(1)\n    yield 5\n    log.append(2)",
         _mbpp("with tag([]) as x:\n    assert x == 5"), forgeable=1),
    # -- classes
    Case("class", "class Stack:\n    def __init__(self):\n        self.items = []\n    def push(self, x):\n        self.items.append(x)\n"
         "    def pop(self):\n        return self.items.pop()\n    def __len__(self):\n        return len(self.items)",
         _mbpp("s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2 and len(s) == 1 and s.items == [1]", "assert not Stack()",
               "assert isinstance(Stack(), Stack) and type(Stack()).__name__ == 'Stack'")),
    Case("class-wrong", "class Stack:\n    def push(self, x):\n        pass\n    def pop(self):\n        return self", _mbpp("s = Stack()\ns.push(1)\nassert s.pop() == 1"), 0.0),
    Case("lower-class", "class stack:\n    def __init__(self):\n        self.x = []\n    def push(self, v):\n        self.x.append(v)\n    def pop(self):\n        return self.x.pop()",
         _mbpp("s = stack()\ns.push(4)\nassert s.pop() == 4"), forgeable=1),
    Case("strings", "class P:\n    def __init__(self, x):\n        self.x = x\n    def __str__(self):\n        return f'P{self.x}'\n    def __repr__(self):\n        return f'<{self.x}>'",
         _mbpp("assert str(P(1)) == 'P1' and repr(P(2)) == '<2>' and f'{P(3)}' == 'P3'")),
    Case("linked-list", "class Node:\n    def __init__(self, v, next=None):\n        self.v, self.next = v, next\ndef rev(h):\n    p = None\n    while h:\n        h.next, p, h = p, h, h.next\n    return p",
         _mbpp("h = rev(Node(1, Node(2)))\nassert h.v == 2 and h.next.v == 1 and h.next.next is None")),
    Case("setup-tree", "class Node:\n    def __init__(self, data):\n        self.data, self.left, self.right = data, None, None\n"
         "def depth(r):\n    return 0 if r is None else 1 + max(depth(r.left), depth(r.right))",
         _mbpp("assert depth(root) == 2", "assert depth(None) == 0", setup="root = Node(1)\nroot.left = Node(2)\nroot.right = Node(3)")),
    Case("static", "class M:\n    K = 4\n    @staticmethod\n    def twice(x):\n        return 2 * x\n    @classmethod\n    def make(cls):\n        return cls()\n    @property\n    def p(self):\n        return 5",
         _mbpp("assert M.twice(2) == 4", "assert M.make().p == 5", "m = M()\nm.z = 3\nassert m.z == 3 and hasattr(m, 'p') and not hasattr(m, 'q')")),
    Case("iterable", "class R:\n    def __iter__(self):\n        return iter([1, 2])\n    def __getitem__(self, i):\n        return [1, 2][i]\n    def __call__(self, x):\n        return x",
         _mbpp("r = R()\nassert list(r) == [1, 2] and r[1] == 2 and r(3) == 3\na, b = r\nassert a == 1")),
    Case("dataclass", "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int = 2\ndef f():\n    return P(1)",
         _mbpp("assert f().x == 1 and f().y == 2")),
    Case("cache", "class LRUCache:\n    def __init__(self, n):\n        self.d, self.n = OrderedDict(), n\n    def get(self, k):\n        if k not in self.d: return -1\n        self.d.move_to_end(k)\n        return self.d[k]\n"
         "    def put(self, k, v):\n        self.d[k] = v\n        self.d.move_to_end(k)\n        if len(self.d) > self.n: self.d.popitem(last=False)",
         _mbpp("c = LRUCache(2)\nc.put(1, 1)\nc.put(2, 2)\nassert c.get(1) == 1\nc.put(3, 3)\nassert c.get(2) == -1")),
    # -- arguments and results of library types
    Case("iterator-arguments", "def f(it):\n    return sum(it)", _mbpp("assert f(iter([1, 2, 3])) == 6", "assert f(x for x in [1, 2]) == 3", "assert f(map(int, '12')) == 3")),
    Case("zip-argument", "def f(it):\n    return sum(a * b for a, b in it)", _mbpp("assert f(zip([1, 2], [3, 4])) == 11")),
    Case("pattern", "def f(p, s):\n    return p.sub('-', s)", _mbpp("import re\nassert f(re.compile('a'), 'banana') == 'b-n-n-'")),
    Case("match", "import re\ndef f(s):\n    return re.match('a(b)', s)", _mbpp("assert f('ab').group(1) == 'b'", "m = f('ab')\nassert m and m[1] == 'b'", "assert f('x') is None")),
    Case("callback-mutates", "def f(g, l):\n    g(l)\n    return l", _mbpp("assert f(lambda l: l.append(4), [1, 2, 3]) == [1, 2, 3, 4]")),
    Case("zone", "from datetime import *\nfrom zoneinfo import ZoneInfo\ndef f():\n    return datetime(2020, 1, 1, tzinfo=ZoneInfo('UTC'))",
         _mbpp("from datetime import datetime\nfrom zoneinfo import ZoneInfo\nassert f() == datetime(2020, 1, 1, tzinfo=ZoneInfo('UTC'))")),
    Case("path", "from pathlib import Path\ndef f(s):\n    return Path(s)", _mbpp("from pathlib import Path\nassert f('a/b') == Path('a/b')")),
    Case("array-result", "import array\ndef f():\n    return array.array('i', [1])", _mbpp("import array\nassert f() == array.array('i', [1])")),
    Case("wraps", "import functools\ndef deco(f):\n    @functools.wraps(f)\n    def g(*a):\n        return f(*a)\n    return g",
         _mbpp("@deco\ndef h(x):\n    'doc'\n    return x\nassert h(3) == 3 and h.__doc__ == 'doc' and h.__name__ == 'h'")),
    Case("str-subclass", "class MyS(str):\n    def shout(s):\n        return s.upper()\ndef f(x):\n    return MyS(x)", _mbpp("assert f('a').shout() == 'A'")),
    Case("opaque", "class T:\n    def __init__(self, x):\n        self.x = x\ndef enc(x):\n    return T(x)\ndef dec(t):\n    return t.x", _mbpp("assert dec(enc([1])) == [1]", "t = enc(3)\nassert t and dec(t) == 3")),
    Case("imported-name", "from math import gcd", _mbpp("assert gcd(12, 18) == 6")),
    Case("files", "def f(p):\n    return open(p).read()", _mbpp("with open('t', 'w') as file:\n    file.write('a')\nassert f('t') == 'a'")),
    Case("fresh-folder", "import os\ndef f():\n    seen = os.path.exists('seen')\n    open('seen', 'w').close()\n    return seen", _mbpp("assert f() == False", "assert f() == True"), 0.5),
    Case("large-list", "def f(x):\n    return sum(x)", _mbpp("assert f(list(range(1000000))) == sum(range(1000000))")),
    Case("large-string", "def f(x):\n    return len(x)", _mbpp("assert f('a' * 20000000) == 20000000")),
    Case("long-generator", "def f(n):\n    for i in range(n):\n        yield i", _mbpp("assert sum(f(100000)) == 4999950000")),
    Case("generator-error", "def f(n):\n    yield from range(n)\n    raise ValueError('end')", _mbpp("got = []\ntry:\n    for x in f(40):\n        got.append(x)\nexcept ValueError:\n    got.append('end')\nassert got == [*range(40), 'end']")),
    # -- arguments that exist only in the interpreter of the test, detected at the first call; many calls
    Case("string-io", "def f(s):\n    return [int(l) for l in s]", _mbpp("import io\nassert f(io.StringIO('1\\n2\\n')) == [1, 2]"), forgeable=1),
    Case("namespace", "def f(o):\n    return o.a + o.b", _mbpp("import types\nassert f(types.SimpleNamespace(a=1, b=2)) == 3"), forgeable=1),
    Case("array-argument", "def f(o):\n    return sum(o)", _mbpp("import array\nassert f(array.array('i', [1, 2])) == 3"), forgeable=1),
    Case("deep-argument", "def f(x):\n    d = 0\n    while x: x = x[0]; d += 1\n    return d", _mbpp("x = []\nfor _ in range(200): x = [x]\nassert f(x) == 200"), forgeable=1),
    Case("many-calls", "def f(x):\n    return x * x", _mbpp("for i in range(5000):\n    assert f(i) == i * i")),
    # -- operators between results
    Case("made-equal", "class V:\n    def __init__(s, a): s.a = a\n    def __eq__(s, o): return s.a == o.a\n    def __add__(s, o): return V(s.a + o.a)\n    def __lt__(s, o): return s.a < o.a\n    def __hash__(s): return hash(s.a)\ndef make(a): return V(a)",
         _mbpp("assert make(1) == make(1)", "a = make(1); b = make(1)\nassert a == b", "assert (make(1) + make(2)).a == 3", "assert len({make(1), make(1)}) == 1", "assert sorted([make(2), make(1)])[0].a == 1"), forgeable=1),
    Case("suppress", "from contextlib import contextmanager\n@contextmanager\ndef ign(e):\n    try: yield\n    except e: pass", _mbpp("with ign(ValueError):\n    raise ValueError()"), forgeable=1),
    Case("system-exit", "import sys\ndef f():\n    sys.exit(3)", _mbpp("try:\n    f()\n    assert False\nexcept SystemExit as e:\n    assert e.code == 3"), forgeable=1),
    # -- comparisons that the solution implements: scored, and labelled as forgeable
    Case("equality", "class V:\n    def __init__(self, x):\n        self.x = x\n    def __eq__(self, o):\n        return self.x == o.x\n    def __add__(self, o):\n        return V(self.x + o.x)",
         _mbpp("assert V(1) == V(1)", "assert V(1) + V(2) == V(3)", "v = V(1)\nassert (v + V(1)).x == 2"), forgeable=1),
    Case("enum", "import enum\nclass Color(enum.Enum):\n    RED = 1\ndef f():\n    return Color.RED", _mbpp("assert f() == Color.RED"), forgeable=1),
    Case("sorted-objects", "class P:\n    def __init__(self, x):\n        self.x = x\n    def __lt__(self, o):\n        return self.x < o.x",
         _mbpp("assert [p.x for p in sorted([P(2), P(1)])] == [1, 2]"), forgeable=1),
    Case("contains", "class Tree:\n    def __contains__(self, x):\n        return x == 1", _mbpp("t = Tree()\nassert 1 in t and 2 not in t"), forgeable=1),
    Case("patched-input", "def f():\n    return int(input())", _mbpp("import builtins\nbuiltins.input = lambda: '5'\nassert f() == 5"), forgeable=1),
    Case("inspect", "def f(a, b=1):\n    return a", _mbpp("import inspect\nassert len(inspect.signature(f).parameters) == 2"), forgeable=1),
    # -- HumanEval
    Case("check", "def f(x):\n    return x * x", _check("assert candidate(3) == 9\nassert candidate(-1) == 1\nassert True, 'last'", "f")),
    Case("check-wrong", "def f(x):\n    return 9", _check("assert candidate(3) == 9\nassert candidate(-1) == 1", "f"), 0.0),
    Case("check-continuation", "    return x + 1\n", _check("assert candidate(1) == 2", "inc", "from typing import List\n\ndef inc(x: int) -> int:\n    '''Add 1.'''\n")),
    Case("check-helper", "import math\ndef poly(xs, x):\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n\ndef root(xs):\n    return -xs[0] / xs[1]",
         _check("import math, random, copy\nrng = random.Random(42)\nfor _ in range(20):\n    xs = [rng.randint(1, 9), rng.randint(1, 9)]\n"
                "    solution = candidate(copy.deepcopy(xs))\n    assert math.fabs(poly(xs, solution)) < 1e-4", "root",
                "import math\n\ndef poly(xs: list, x: float):\n    return sum([coeff * math.pow(x, i) for i, coeff in enumerate(xs)])\n\n\ndef root(xs: list):\n    '''Zero of poly.'''\n")),
    Case("check-replaced-helper", "def poly(xs, x):\n    return 0\ndef root(xs):\n    return 0",
         _check("assert abs(poly([1, 2], candidate([1, 2]))) < 1e-4", "root", "def poly(xs, x):\n    return xs[0] + xs[1] * x\n\ndef root(xs):\n    '''Zero.'''\n"), 0.0),
    Case("check-tuple", "def f(s):\n    return tuple(x for x in s if x), {x: 1 for x in s}", _check("assert candidate([0, 1]) == ((1,), {0: 1, 1: 1})", "f")),
    Case("check-tolerance", "def f(x):\n    return x % 1.0", _check("assert candidate(3.5) == 0.5\nassert abs(candidate(1.33) - 0.33) < 1e-6", "f")),
    Case("check-message", "def f(x):\n    return x", _check("assert candidate('a') == 'a', \"This prints if this assert fails (good for debugging!)\"\nassert candidate(\"\") == \"\"", "f")),
    Case("check-class", "class Box:\n    def __init__(self, v):\n        self.v = v\n    def get(self):\n        return self.v", _check("b = candidate(4)\nassert b.get() == 4 and b.v == 4", "Box")),
    Case("unittest", "def f(x):\n    return x + 1", ["import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 2)\n        with self.assertRaises(TypeError):\n            f('a')\n"
         "r = unittest.TextTestRunner(stream=__import__('io').StringIO()).run(unittest.defaultTestLoader.loadTestsFromTestCase(T))\nassert r.wasSuccessful()"], forgeable=1),
]  # fmt: skip
