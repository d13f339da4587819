"""Changes a compiled policy so that one of its hooks traps. The tests then need no compiler for policies."""

from __future__ import annotations

from collections.abc import Iterator

_COMPONENT = b"\0asm\x0d\0\x01\0"
_CORE_MODULE = 1
_IMPORTS, _EXPORTS, _CODE = 2, 7, 10
_FUNCTION = 0
_UNREACHABLE, _NOP, _END = b"\x00", b"\x01", b"\x0b"


def trapping(policy: bytes, hook: str) -> bytes:
    """The policy, whose function for this hook begins with `unreachable`. The length of the policy does not change."""
    if not policy.startswith(_COMPONENT):
        raise ValueError("the policy is not a WebAssembly component")
    for kind, module_start, module_end in _sections(policy, len(_COMPONENT), len(policy)):
        if kind != _CORE_MODULE:
            continue
        body = _body_of(policy, module_start, module_end, hook.encode())
        if body:
            start, end = body
            # No local variables; the rest of the body is never reached.
            code = b"\0" + _UNREACHABLE + _NOP * (end - start - 3) + _END
            return policy[:start] + code + policy[end:]
    raise ValueError(f"no module of the policy exports {hook}")


def _body_of(data: bytes, start: int, end: int, name: bytes) -> tuple[int, int] | None:
    """The code of an exported function of a module."""
    sections = {kind: (at, until) for kind, at, until in _sections(data, start + 8, end)}
    if _EXPORTS not in sections or _CODE not in sections:
        return None
    imported = 0
    if _IMPORTS in sections:
        count, at = _number(data, sections[_IMPORTS][0])
        for _ in range(count):
            for _ in range(2):
                length, at = _number(data, at)
                at += length
            if data[at] != _FUNCTION:
                raise ValueError("the module imports something else than functions")
            imported += 1
            _, at = _number(data, at + 1)
    wanted = None
    count, at = _number(data, sections[_EXPORTS][0])
    for _ in range(count):
        length, at = _number(data, at)
        exported, kind = data[at : at + length], data[at + length]
        index, at = _number(data, at + length + 1)
        if exported == name and kind == _FUNCTION:
            wanted = index - imported
    if wanted is None:
        return None
    _, at = _number(data, sections[_CODE][0])
    for _ in range(wanted):
        size, at = _number(data, at)
        at += size
    size, at = _number(data, at)
    return at, at + size


def _sections(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Each section with its kind and the bounds of its contents."""
    while at < end:
        kind = data[at]
        size, at = _number(data, at + 1)
        yield kind, at, at + size
        at += size


def _number(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned LEB128 number, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
