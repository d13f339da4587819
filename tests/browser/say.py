"""What the test prints, and how it counts: a line a case, and a last line for scripts."""

from __future__ import annotations

import time


class TestError(Exception):
    """Something is not as it must be. The text says what, and what to do where that is known."""


class Score:
    """Passed and failed cases."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed = 0

    def ok(self, name: str) -> None:
        self.passed += 1
        print(f"ok    {name}", flush=True)

    def fail(self, name: str, why: object) -> None:
        self.failed += 1
        print(f"FAIL  {name}: {' '.join(str(why).split())[:1500]}", flush=True)

    def last_line(self) -> str:
        return f"browser: {self.passed} passed, {self.failed} failed"


def check(holds: object, says: str) -> None:
    """An assertion that `python -O` keeps."""
    if not holds:
        raise TestError(says)


def until(what: str, look, seconds: float = 30.0):
    """Calls `look` until it returns something true, and returns that."""
    end = time.monotonic() + seconds
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() > end:
            raise TestError(f"{what}: not within {seconds:g} s")
        time.sleep(0.05)
