"""Reads the steps of docs/changeover.md, which the change-over cases do one by one.

A step of the page that the test does not know fails the case, and the `berth` commands in it are run as they
stand. So the page has no step that is not tested.
"""

from __future__ import annotations

import re
import shlex

from places import REPO
from say import TestError

_PAGE = "docs/changeover.md"
_CHAPTER = "## Change over while pods run"


class Step:
    """One numbered step: its title in bold, and the commands of its `sh` block."""

    def __init__(self, text: str) -> None:
        title = re.match(r"\d+\. \*\*(.+?)\*\*", text)
        if not title:
            raise TestError(f"{_PAGE}: a step does not begin with a bold title: {text.splitlines()[0]}")
        self.title = title.group(1)
        self.commands = []
        for block in re.findall(r"```sh\n(.*?)```", text, re.S):
            for line in block.splitlines():
                if words := shlex.split(line, comments=True):
                    self.commands.append(words)


def steps(heading: str) -> list[Step]:
    """The steps below a `### heading` of the chapter."""
    text = (REPO / _PAGE).read_text(encoding="utf-8")
    chapter = text.partition(f"{_CHAPTER}\n")[2].partition("\n## ")[0]
    part = chapter.partition(f"### {heading}\n")[2].partition("\n### ")[0]
    found = [Step(item) for item in re.split(r"^(?=\d+\. )", part, flags=re.M)[1:]]
    if not found:
        raise TestError(f"{_PAGE}: no steps below '{heading}' in '{_CHAPTER}'")
    return found


def follow(heading: str, doing: dict, berth) -> None:
    """Does each step: what the test does for its title, then its `berth` commands by `berth(*args)`.

    `doing` starts and stops the two programs by its own means, so `berth serve` and other programs' commands are not run.
    """
    described = steps(heading)
    titles = [step.title for step in described]
    if titles != list(doing):
        raise TestError(f"{_PAGE} has the steps {titles}; this test does {list(doing)}")
    for step in described:
        try:
            doing[step.title]()
            for command in step.commands:
                if command[0] == "berth" and command[1] != "serve":
                    berth(*command[1:])
        except Exception as why:
            raise TestError(f"step '{step.title}': {why}") from why
