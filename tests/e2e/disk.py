"""A disk that is slow at a moment that the test chooses: slow_disk.c in every process of Berth, in front of the C library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import process
from places import HERE, RUN
from say import until

_LIBRARY = RUN / "slow_disk.so"
#: While it exists, the next write that is made durable is slow; it is renamed while that write lasts.
_ARMED = RUN / "slow-disk"
_SLOW = Path(f"{_ARMED}.now")


def slow() -> dict[str, str]:
    """The environment of a program whose writes can be made slow."""
    compiler = ["cc", "-Os", "-shared", "-fPIC", "-o", _LIBRARY, HERE / "slow_disk.c"]
    process.run(compiler, "compile slow_disk.c (a C compiler and libc: Debian's gcc and libc6-dev)")
    return {"LD_PRELOAD": str(_LIBRARY), "E2E_SLOW_DISK": str(_ARMED)}


@contextmanager
def armed() -> Iterator[None]:
    """The next write is slow."""
    _ARMED.touch()
    try:
        yield
    finally:
        _ARMED.unlink(missing_ok=True)


def wait_for_write(seconds: float) -> None:
    """Returns at the beginning of the slow write."""
    until("Berth writes to its disk", seconds, lambda: not _ARMED.exists(), every=0.002)


def is_writing() -> bool:
    """Whether the slow write lasts."""
    return _SLOW.exists()
