"""Runs the tests of situations that users of GPU nodes reported, and prints one line for each.

A test in tests/it is one of them if its doc comment has lines `Report: URL`, the first words of the comment are its title.
`run.py` runs all of them, `run.py TEXT` those whose name, title or report contains the text.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests/it"

#: A doc comment with a report, and the test that it belongs to.
CASE = re.compile(
    r"(?P<doc>(?:^/// .*\n)*?^/// Report: .*\n(?:^/// .*\n)*)(?:^#\[.*\n)*^(?:async )?fn (?P<name>\w+)", re.M
)
#: The trackers of which reports are taken.
REPORT = re.compile(r"^https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+$")


def cases() -> dict[str, tuple[str, list[str]]]:
    """The title and the reports of each case, by the name of its test."""
    found = {}
    for file in sorted(TESTS.rglob("*.rs")):
        module = "::".join(file.relative_to(TESTS).with_suffix("").parts).removesuffix("::mod")
        for match in CASE.finditer(file.read_text()):
            lines = [line.removeprefix("///").strip() for line in match["doc"].splitlines()]
            reports = [line.removeprefix("Report: ") for line in lines if line.startswith("Report: ")]
            wrong = [report for report in reports if not REPORT.match(report)]
            if wrong:
                sys.exit(f"{file}: {match['name']}: not the address of an issue: {', '.join(wrong)}")
            title = " ".join(line for line in lines if not line.startswith("Report: "))
            found[f"{module}::{match['name']}"] = (title or match["name"].replace("_", " "), reports)
    return found


def results(names: list[str]) -> dict[str, str]:
    """The result of each test that ran: ok, FAILED or ignored."""
    command = ["cargo", "test", "--locked", "--test", "it", "--", "--exact", *names]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    outcome = {}
    for line in run.stdout:
        if match := re.match(r"test (\S+) \.\.\. (ok|FAILED|ignored)", line):
            outcome[match[1]] = match[2]
        elif not re.match(r"test (\S+) |running \d", line):
            # What a failed test printed.
            print(line, end="")
    run.wait()
    return outcome


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = {
        name: (title, reports)
        for name, (title, reports) in cases().items()
        if wanted.lower() in " ".join([name, title, *reports]).lower()
    }
    if not chosen:
        sys.exit(f"no case contains {wanted!r}")
    outcome = results(list(chosen))
    passed = 0
    for name, (title, reports) in chosen.items():
        # A test that did not run, such as one that was renamed while this ran, has failed.
        result = outcome.get(name, "did not run")
        passed += result == "ok"
        print(f"{result:6}  {title} ({', '.join(reports)})")
    failed = len(chosen) - passed
    print(f"reports: {passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
