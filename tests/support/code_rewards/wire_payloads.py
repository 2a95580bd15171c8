"""Attacks on the protocol between solution and test process: malformed, early, repeated and forged messages."""

from __future__ import annotations

import random

_FIND = """
def channels():
    return [number for number in range(3, 32) if _is_open(number)]
def _is_open(number):
    try: os.fstat(number)
    except OSError: return False
    return True
def send(data, length=None):
    for number in channels():
        try:
            os.set_blocking(number, False)
            os.write(number, struct.pack('!I', len(data) if length is None else length) + data)
        except OSError: pass
"""

_VALUES = (
    '["object",0,0]', '["class",0]', '["checker",0]', '["same",0]', '["same",-1]', '["list",["same",0]]', '["missing"]',
    '["exception",["standard","builtins","StopIteration","StopIteration"],["tuple"],["dict"],""]',
    '["exception",["standard","builtins","SystemExit","SystemExit"],["tuple",0],["dict"],""]',
    '["standard","os","_exit","object"]', '["standard","builtins","eval","object"]', '["type","object"]',
    '["named","x",["__eq__"],1]', '["named","a b",["c"],1]', '["array","|O8",[1],"0000000000000000"]',
    '["array","<i8",[1000000000],""]', '["int","0x' + "f" * 1000 + '"]', '["decimal","1e999999999"]', '["range",0,1,0]',
    '["dict",["list"],1]', '["defaultdict",["object",0,0]]', '["deque",-5]', '["complex","nan","x"]', '{"a":1,"a":2}',
    "NaN", "1e999", "[" * 3000 + "]" * 3000, '["set",["list"]]', '["constant","ellipsis"]', '["float","nan"]',
)  # fmt: skip


def wire_payload(seed: int) -> str:
    """A body of `attack()` that sends messages, chosen by `seed`, when the test process expects a reply."""
    choose = random.Random(seed)
    messages: list[str] = []
    for _ in range(choose.randint(1, 6)):
        value = choose.choice(_VALUES)
        number = choose.choice(["1", "2", "3", "0", "-1", "1.0", "true", "null", '"1"'])
        outcome = choose.choice(["value", "raise", "other"])
        updates = choose.choice(["[]", "[[0,1]]", '[[0,["list",1]]]', "[[5,null]]", "null"])
        form = choose.randrange(6)
        if form < 3:
            messages.append(f'["reply",{number},["{outcome}",{value},{updates},""]]')
        elif form == 3:
            messages.append(
                f'["request",{number},"{choose.choice(["call", "get", "describe", "exit"])}",[0,[{value}],[],""]]'
            )
        elif form == 4:
            messages.append(f'["hello",{choose.choice(["true", "1", "null"])}]')
        else:
            messages.append(choose.choice(["", "null", "[]", "[[]]", "\x00", "\x80\xff", "9" * 5000, '["reply"]']))
    lengths = [choose.choice([None, None, None, 0, 1, 2**24 + 1, 2**32 - 1]) for _ in messages]
    sends = [f"send({text.encode('latin-1')!r}, {length})" for text, length in zip(messages, lengths, strict=True)]
    last = choose.choice(["return None", "os._exit(0)", "time.sleep(5)", "os.closerange(3, 64)"])
    return "\n".join([_FIND, *sends, last])
