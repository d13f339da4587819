"""A child process with a log file, that never outlives the test."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

from say import Hopeless, TestError

# Loaded before any fork: a child of a fork may only make system calls.
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Process:
    """One program. Its output is appended to `log`, so a restart goes on in the same file."""

    def __init__(self, name: str, args: list, log: Path, env: dict | None = None) -> None:
        self.name = name
        self.args = [str(a) for a in args]
        self.log = log
        self.env = {**os.environ, **(env or {})}
        self._child: subprocess.Popen | None = None

    def start(self) -> None:
        """Starts it in a session of its own, so that Ctrl-C reaches the test alone."""
        with open(self.log, "ab") as out:
            out.write(f"--- {' '.join(self.args)}\n".encode())
            out.flush()
            self._child = subprocess.Popen(
                self.args,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        if self._child is None:
            raise TestError(f"{self.name} was not started")
        return self._child.pid

    def check(self) -> None:
        """Hopeless if it has ended, with its last words."""
        code = self._child.poll() if self._child else None
        if code is not None:
            raise Hopeless(f"{self.name} ended with {code}: {self.last_words()}")

    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def stop(self, seconds: float = 10) -> tuple[int, float]:
        """SIGTERM, then SIGKILL after `seconds`. Returns the exit status and how long it took."""
        if self._child is None:
            return 0, 0.0
        begin = time.monotonic()
        if self._child.poll() is None:
            self._child.terminate()
            try:
                self._child.wait(seconds)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        return self._child.returncode, time.monotonic() - begin

    def kill(self) -> None:
        """kill -9, as a crash would."""
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
        if self._child is not None:
            self._child.wait()

    def last_words(self, lines: int = 3) -> str:
        try:
            text = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return " | ".join(line.strip() for line in text[-lines:]) + f" (all of it: {self.log})"


def run(args: list, what: str, env: dict | None = None, seconds: float = 120) -> str:
    """Runs a program to its end and returns what it printed; `TestError` naming `what` if it fails."""
    code, text = ended(args, what, env, seconds)
    if code != 0:
        raise TestError(f"{what}: exit {code}: {text.strip()[-800:]}")
    return text


def ended(args: list, what: str, env: dict | None = None, seconds: float = 120) -> tuple[int, str]:
    """Runs a program to its end, which may be a failure. Returns its exit status and what it printed."""
    try:
        done = subprocess.run(
            [str(a) for a in args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TestError(f"{what}: {error}") from error
    return done.returncode, done.stdout.decode(errors="replace")
