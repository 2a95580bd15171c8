"""Files that run a command or exhaust memory in an unprotected loader. Each command creates the folder `canary`."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

P2 = b"\x80\x02"  # header of pickle protocol 2
EXTENSION = 240
"""The extension code under which a test registers `posix.mkdir` in copyreg."""


class Hostile:
    """Unpickling it calls `os.makedirs`."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        import os

        return os.makedirs, (str(self.canary),)


def _text(value: str | Path) -> bytes:
    return b"X" + struct.pack("<I", len(str(value))) + str(value).encode()


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _code(canary: Path) -> str:
    return f"__import__('os').mkdir({str(canary)!r})"


def code_pickles(canary: Path) -> dict[str, bytes]:
    """By technique: pickles that create `canary` when `pickle.loads` reads them (without the opcode STOP)."""
    path, mkdir = _text(canary), _global("posix", "mkdir")
    make_list, mapped = _global("builtins", "list"), _global("builtins", "map")
    code, call = _text(_code(canary)), _global("builtins", "eval")
    torch_file = io.BytesIO()
    torch.save(Hostile(canary), torch_file)
    file_pickle = torch_file.getvalue()
    return {
        "GLOBAL REDUCE": P2 + mkdir + path + b"\x85R",
        "STACK_GLOBAL": b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x93" + path + b"\x85R",
        "INST": b"(" + path + b"iposix\nmkdir\n",
        "OBJ": b"(" + mkdir + path + b"o",
        "NEWOBJ": P2 + make_list + mapped + mkdir + b"]" + path + b"a\x86\x81\x85R",
        "NEWOBJ_EX": b"\x80\x04" + make_list + mapped + mkdir + b"]" + path + b"a\x86}\x92\x85R",
        "EXT1": P2 + b"\x82" + bytes([EXTENSION]) + path + b"\x85R",
        "eval": P2 + call + code + b"\x85R",
        "getattr": P2
        + _global("builtins", "getattr")
        + _global("builtins", "__import__")
        + _text("posix")
        + b"\x85R"
        + _text("mkdir")
        + b"\x86R"
        + path
        + b"\x85R",
        "dotted name": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93" + path + b"\x85R",
        "partial": P2 + _global("functools", "partial") + mkdir + path + b"\x86R)R",
        "BUILD": P2 + _global("functools", "partial") + mkdir + b"\x85R(" + mkdir + path + b"\x85}Ntb)R",
        "map": P2 + make_list + mapped + mkdir + b"]" + path + b"a\x86R\x85R",
        "torch._tensor rebuild": P2
        + _global("torch._tensor", "_rebuild_from_type_v2")
        + b"("
        + mkdir
        + _global("builtins", "int")
        + path
        + b"\x85}tR",
        "torch._utils rebuild": P2
        + _global("torch._utils", "_rebuild_parameter_with_state")
        + b"("
        + mkdir
        + path
        + b"\x85R\x88}}tR",
        "torch bytes": P2
        + _global("torch.storage", "_load_from_bytes")
        + b"B"
        + struct.pack("<I", len(file_pickle))
        + file_pickle
        + b"\x85R",
        "numpy array of objects": pickle.dumps(np.array([Hostile(canary)], dtype=object), 2)[:-1],
        "beside tensors": pickle.dumps({"weight": [1.0], "extra": Hostile(canary)}, 2)[:-1],
        "run a file": P2 + _global("runpy", "run_path") + _text(_script(canary)) + b"\x85R",
        "import": P2 + _global("importlib", "import_module") + _text("posix") + b"\x85R0" + mkdir + path + b"\x85R",
    }


def _script(canary: Path) -> Path:
    file = canary.parent / "script.py"
    file.write_text(_code(canary) + "\n")
    return file


def zip_of(data_pkl: bytes, members: Mapping[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive as `torch.save` lays it out, around any pickle."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data_pkl)
        archive.writestr("archive/byteorder", b"little")
        for name, value in (members or {}).items():
            archive.writestr(f"archive/{name}", value)
        archive.writestr("archive/version", b"3\n")
    return content.getvalue()


def torch_pickle(shape: tuple[int, ...], stride: tuple[int, ...], elements: int, key: str = "0") -> bytes:
    """The pickle of a float32 tensor in a file of `torch.save`."""
    storage = b"(" + _text("storage") + _global("torch", "FloatStorage") + _text(key) + _text("cpu") + _number(elements)
    numbers = [b"(" + b"".join(map(_number, values)) + b"t" for values in (shape, stride)]
    call = b"(" + storage + b"tQK\x00" + b"".join(numbers) + b"\x89" + _global("collections", "OrderedDict") + b")R"
    return P2 + _global("torch._utils", "_rebuild_tensor_v2") + call + b"tR."


def _number(value: int) -> bytes:
    data = value.to_bytes(8, "little")
    return b"\x8a\x08" + data


def memory_archives() -> dict[str, bytes]:
    """By technique: small files of `torch.save` that an unprotected loader expands to much memory."""
    huge = 500_000_000
    imports = b"".join(_global("torch", f"a{number}") for number in range(200_000))
    return {
        "compressed storage": _bomb(torch_pickle((huge,), (1,), huge), "data/0"),
        "compressed pickle": _bomb(None, "data.pkl"),
        "repeated element": zip_of(torch_pickle((huge,), (0,), 1), {"data/0": bytes(4)}),
        "storage shorter than its tensor": zip_of(torch_pickle((huge,), (1,), huge), {"data/0": bytes(4)}),
        "storage larger than the file": _larger(zip_of(torch_pickle((huge,), (1,), huge), {"data/0": bytes(4)})),
        "memo index": zip_of(P2 + b"Nr\xff\xff\xff\x07."),
        "copies of arguments": zip_of(_copies(_global("torch", "device"), b"h\x00")),
        "copies of a shape": zip_of(_copies(_global("torch", "Size"), b"h\x00\x85")),
        "copies of a state": zip_of(_copied_state()),
        "copies of text": zip_of(_copied_text()),
        "long number": zip_of(P2 + b"\x8b" + struct.pack("<I", 2**31 - 1) + b"1" * 100 + b"."),
        "long bytes": zip_of(b"\x80\x04\x8e" + struct.pack("<Q", 2**34) + b"1" * 100 + b"."),
        "many classes": zip_of(P2 + b"(" + imports + b"t."),
        "nested tuples": zip_of(P2 + b"})" + b"\x85" * 3_000_000 + b"Ns."),
    }


def _bomb(data_pkl: bytes | None, name: str) -> bytes:
    """96 MiB of zeros, compressed."""
    content, zeros = io.BytesIO(), bytes(2**22)
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        if data_pkl is not None:
            archive.writestr("archive/data.pkl", data_pkl)
        with archive.open(f"archive/{name}", "w") as member:
            for _ in range(24):
                member.write(zeros)
    return content.getvalue()


def _larger(archive: bytes) -> bytes:
    """Set the size of the storage to 2 GiB in the central directory of the archive."""
    header_offset = archive.rfind(b"PK\x01\x02", 0, archive.rfind(b"archive/data/0"))
    sizes = struct.pack("<II", 2**31, 2**31)
    return archive[: header_offset + 20] + sizes + archive[header_offset + 28 :]


def _copies(function: bytes, argument: bytes) -> bytes:
    """A tuple of 200,000 entries, 2,000 times an argument: copies would take 3 GB."""
    entries = b"(" + b"K\x01" * 200_000 + b"tq\x00"
    return P2 + b"(" + entries + function + b"q\x01" + (b"h\x01" + argument + b"R") * 2_000 + b"t."


def _copied_state() -> bytes:
    entries = b"}q\x00(" + b"".join(_text(f"{number}") + b"N" for number in range(50_000)) + b"u"
    return P2 + b"(" + entries + _global("torch", "device") + b"q\x01" + b"h\x01)\x81h\x00b" * 1_000 + b"t."


def _copied_text() -> bytes:
    text = _text("a" * 1_000_000) + b"q\x00"
    encode = _global("_codecs", "encode") + b"q\x01" + _text("latin1") + b"q\x02"
    return P2 + b"(" + text + encode + b"h\x01h\x00h\x02\x86R" * 1_000 + b"t."


def safetensors_file(header: bytes, size: int | None = None, content: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header) if size is None else size) + header + content


def hostile_arrow_schema(canary: Path) -> pa.Schema:
    """A column whose extension type is a pickle (CVE-2023-47248)."""
    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Hostile(canary)),
    }
    return pa.schema([pa.field("prompt", pa.binary(), metadata=metadata)])


def yaml_tags(canary: Path) -> dict[str, str]:
    path = json.dumps(str(canary))
    return {
        "apply": f"!!python/object/apply:os.mkdir [{path}]",
        "new": f"!!python/object/new:os.mkdir [{path}]",
        "module": "!!python/module:antigravity ''",
        "name": "!!python/name:os.mkdir ''",
        "nested": f"tools: [{{class_name: x, config: !!python/object/apply:os.mkdir [{path}]}}]",
    }
