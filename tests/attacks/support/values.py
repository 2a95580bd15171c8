"""Malicious values as JSON text: numbers, types, texts, sizes, file names."""

from __future__ import annotations

import json

from tests.attacks.support.attack import Repeated

__all__ = ["DEEP", "FILE_NAMES", "NOT_A_NUMBER", "NUMBERS", "REJECTED_TEXTS", "TEXTS", "TYPES", "large_values"]

# Rejected in every numeric field.
NOT_A_NUMBER: dict[str, bytes] = {
    "400-digits": b"9" * 400,
    "minus-400-digits": b"-" + b"9" * 400,
    "5000-digits": b"9" * 5000,
    "1e999": b"1e999",
    "minus-1e999": b"-1e999",
    "400-digits-float": b"9" * 400 + b".0",
    "nan": b"NaN",
    "infinity": b"Infinity",
    "minus-infinity": b"-Infinity",
    "true": b"true",
    "digits-as-text": b'"1"',
    "nan-as-text": b'"nan"',
    "empty-text": b'""',
    "list": b"[]",
    "list-of-number": b"[1]",
    "object": b"{}",
    "2**64": b"18446744073709551616",
    "hex": b"0x10",
    "leading-zero": b"007",
    "plus": b"+1",
}
# Valid JSON numbers: rejected or harmless, as the field defines.
NUMBERS: dict[str, bytes] = {
    "0": b"0",
    "minus-0": b"-0",
    "minus-0.0": b"-0.0",
    "minus-1": b"-1",
    "1.5": b"1.5",
    "1e-40": b"1e-40",
    "1e-320": b"1e-320",
    "1e-5000": b"1e-5000",
    "1e38": b"1e38",
    "3.5e38": b"3.5e38",
    "1e308": b"1e308",
    "2**31": b"2147483648",
    "2**53+1": b"9007199254740993",
    "2**63-1": b"9223372036854775807",
    "2**63": b"9223372036854775808",
    "2**64-1": b"18446744073709551615",
    "minus-2**63": b"-9223372036854775808",
    "null": b"null",
    "long-fraction": b"0." + b"1" * 2000,
}
# In fields that are not numeric.
TYPES: dict[str, bytes] = {
    "null": b"null",
    "number": b"1",
    "float": b"1.5",
    "true": b"true",
    "list": b"[]",
    "nested-list": b"[[[]]]",
    "list-of-null": b"[null]",
    "object": b"{}",
    "object-with-type": b'{"type": {"type": {}}}',
    "400-digits": b"9" * 400,
    "nan": b"NaN",
}


def _escaped(text: str) -> bytes:
    return json.dumps(text).encode()


# Texts that are not Unicode: rejected everywhere.
REJECTED_TEXTS: dict[str, bytes] = {
    "escaped-surrogate": b'"a\\ud800b"',
    "escaped-low-surrogate": b'"\\udc00"',
    "escaped-swapped-pair": b'"\\udc00\\ud800"',
    "raw-surrogate": b'"a\xed\xa0\x80b"',
    "invalid-utf8": b'"a\xffb"',
    "truncated-utf8": b'"\xe2\x82"',
    "overlong-utf8": b'"\xc0\xaf"',
    "utf16": '"a"'.encode("utf-16"),
    "control-character": b'"a\x01b"',
    "unterminated": b'"abc',
}
TEXTS: dict[str, bytes] = {
    "empty": b'""',
    "nul": b'"\\u0000"',
    "nul-inside": b'"a\\u0000b"',
    "bidi": _escaped("\u202eabc\u202c\u2066x\u2069"),
    "bom": _escaped("\ufeffabc"),
    "noncharacters": _escaped("\ufffe\uffff\U0010ffff"),
    "combining": _escaped("e" + "\u0301" * 20_000),
    "zwj": _escaped("\U0001f468\u200d" * 5_000),
    "newlines": _escaped("\r\n" * 2_000),
    "spaces": _escaped(" " * 100_000),
    "terminal-escapes": _escaped("\x1b[2J\x1b]0;x\x07"),
    "header-injection": _escaped("x\r\nSet-Cookie: a=b\r\n\r\n"),
    "log-injection": _escaped("x\nERROR Traceback\n"),
    "format": _escaped("%s%n{0}{__class__}${jndi:ldap://x}{{7*7}}"),
    "html": _escaped("<script>alert(1)</script>"),
    "special-tokens": _escaped("<|end|><|system|>" * 50),
    "long-escapes": b'"' + b"\\u0041" * 20_000 + b'"',
}
FILE_NAMES: dict[str, str] = {
    "empty": "",
    "dot": ".",
    "dot-dot": "..",
    "parent": "../x",
    "deep-parent": "a/../../x",
    "many-parents": "../" * 500 + "etc/passwd",
    "absolute": "/etc/attack",
    "double-slash": "//etc//attack",
    "proc": "/proc/self/mem",
    "self-root": "/proc/self/root/x",
    "device": "/dev/full",
    "trailing-slash": "a/",
    "file-below-file": "main.py/x",
    "nul": "a\0b",
    "newline": "a\nb",
    "carriage-return": "a\r\nb",
    "backslash": "..\\..\\x",
    "10-KB": "x" * 10_000,
    "300-bytes": "x" * 300,
    "4096-bytes": "x/" * 2_047 + "xx",
    "2000-directories": "/".join("d" * 1 for _ in range(2_000)),
    "long-unicode": "\u00e9" * 200,
    "bidi": "a\u202etxt.exe",
    "tilde": "~/x",
    "star": "*",
    "dash": "-rf",
    "variable": "$HOME/x",
    "reserved": "CON",
    "dot-file": ".bashrc",
    "sitecustomize": "sitecustomize.py",
    "shadow-module": "json.py",
    "space": " ",
    "control": "\x01\x1b[2J",
    "private-use": "\U0010fffd",
}


def _repeat(head: bytes, unit: bytes, size: int, tail: bytes) -> Repeated:
    return Repeated(head, unit, max(1, size // len(unit)), tail)


def large_values(size: int) -> dict[str, Repeated]:
    """Values of about `size` bytes."""
    return {
        "text": _repeat(b'"', b"x", size, b'"'),
        "words": _repeat(b'"', b"word ", size, b'"'),
        "different-words": _repeat(b'"', b"".join(b"w%05d " % n for n in range(10_000)), size, b'"'),
        "escapes": _repeat(b'"', b"\\u00e9", size, b'"'),
        "four-byte-characters": _repeat(b'"', "\U0001f600".encode(), size, b'"'),
        "spaces": _repeat(b'"', b" ", size, b'"'),
        "list-of-texts": _repeat(b"[", b'"x",', size, b'""]'),
        "list-of-empty-texts": _repeat(b"[", b'"",', size, b'""]'),
        "list-of-numbers": _repeat(b"[", b"1,", size, b"1]"),
        "list-of-lists": _repeat(b"[", b"[],", size, b"[]]"),
        "list-of-objects": _repeat(b"[", b"{},", size, b"{}]"),
        "list-of-messages": _repeat(b"[", b'{"role":"user","content":"x"},', size, b'{"role":"user","content":"x"}]'),
        "wide-object": _repeat(b"{", b"".join(b'"k%05d":1,' % n for n in range(10_000)), size, b'"x":1}'),
        "long-key": _repeat(b'{"', b"k", size, b'":1}'),
        "digits": _repeat(b"", b"9", size, b""),
        "fraction": _repeat(b"0.", b"1", size, b""),
        "deep-objects": _repeat(b"", b'{"a":', size, b"1"),
    }


DEEP: dict[str, bytes] = {
    "lists-900": b"[" * 900 + b"]" * 900,
    "lists-100k": b"[" * 100_000 + b"]" * 100_000,
    "objects-100k": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "open-lists-100k": b"[" * 100_000,
}
