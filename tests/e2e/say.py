"""What the test prints, and how it counts: one line a case, one last line for scripts."""

from __future__ import annotations

import sys
import time


class TestError(Exception):
    """Something is not as it must be. The text says what, and what to do where that is known."""


class Hopeless(TestError):
    """It will not become as it must be by waiting any longer."""


def note(text: str) -> None:
    """One line of progress."""
    print(f"      {text}", flush=True)


def problem(text: str) -> None:
    """One line on what went wrong outside a case."""
    print(f"e2e: {text}", file=sys.stderr, flush=True)


class Score:
    """Passed and failed cases. A skipped case counts as neither."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed = 0

    def ok(self, name: str, detail: str = "") -> None:
        self.passed += 1
        print(f"ok    {name}{'  ' + detail if detail else ''}", flush=True)

    def fail(self, name: str, why: object) -> None:
        self.failed += 1
        text = " ".join(str(why).split())
        print(f"FAIL  {name}: {text}", flush=True)

    def skip(self, name: str, why: str) -> None:
        print(f"skip  {name}: skipped: {why}", flush=True)

    def last_line(self) -> str:
        return f"e2e: {self.passed} passed, {self.failed} failed"


def until(what: str, seconds: float, look, every: float = 0.1):
    """Calls `look` until it returns something true, and returns that.

    `look` may raise `TestError` to say why it is not true yet; the last such reason is
    part of the error after `seconds`. `Hopeless` ends the waiting.
    """
    end = time.monotonic() + seconds
    last = ""
    while True:
        try:
            seen = look()
            if seen:
                return seen
        except Hopeless as reason:
            raise TestError(f"{what}: {reason}") from reason
        except TestError as reason:
            last = f" ({reason})"
        if time.monotonic() > end:
            raise TestError(f"{what}: not within {seconds:g} s{last}")
        time.sleep(every)
