"""Runs the tests of situations that users of GPU nodes reported, and prints one line for each.

A test in tests/it, or a unit test in src, is one of them if its doc comment has lines `Report: URL`; the first words of the
comment are its title.
`run.py` runs all of them, `run.py TEXT` those whose name, title or report contains the text.
"""

import dataclasses
import itertools
import pathlib
import re
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]

#: A doc comment with a report, and the test that it belongs to.
CASE = re.compile(
    r"(?P<doc>(?:^ */// .*\n)*?^ */// Report: .*\n(?:^ */// .*\n)*)(?:^ *#\[.*\n)*^ *(?:async )?fn (?P<name>\w+)", re.M
)
#: The trackers of which reports are taken.
REPORT = re.compile(r"^https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+$")


@dataclasses.dataclass
class Case:
    title: str
    reports: list[str]
    #: What `cargo test` needs to run the program with this test.
    program: tuple[str, ...]
    #: The test's name; that of a unit test in a file that is no file of tests has `tests::` before it.
    test: str


def cases() -> list[Case]:
    """All cases, those of one program one behind the other."""
    found = []
    for program, folder in programs():
        for file in sorted(folder.rglob("*.rs")):
            text = file.read_text()
            module = [part for part in file.relative_to(folder).with_suffix("").parts if part not in ("mod", "lib")]
            if folder.parent.name == "src" and "tests" not in module:
                module.append("tests")
            for match in CASE.finditer(text):
                lines = [line.strip().removeprefix("///").strip() for line in match["doc"].splitlines()]
                reports = [line.removeprefix("Report: ") for line in lines if line.startswith("Report: ")]
                wrong = [report for report in reports if not REPORT.match(report)]
                if wrong:
                    sys.exit(f"{file}: {match['name']}: not the address of an issue: {', '.join(wrong)}")
                title = " ".join(line for line in lines if not line.startswith("Report: "))
                test = "::".join([*module, match["name"]])
                found.append(Case(title or match["name"].replace("_", " "), reports, program, test))
    return found


def programs():
    """The programs with tests: that of tests/it, and one of each crate, with the folder of its sources."""
    yield ("-p", "berth", "--test", "it"), ROOT / "tests/it"
    for manifest in sorted(ROOT.glob("src/*/Cargo.toml")):
        name = tomllib.loads(manifest.read_text())["package"]["name"]
        yield ("-p", name, "--lib"), manifest.parent


def results(program: tuple[str, ...], names: list[str]) -> dict[str, str]:
    """The result of each test that ran: ok, FAILED or ignored."""
    command = ["cargo", "test", "--locked", *program, "--", "--exact", *names]
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
    chosen = [case for case in cases() if wanted.lower() in " ".join([case.test, case.title, *case.reports]).lower()]
    if not chosen:
        sys.exit(f"no case contains {wanted!r}")
    passed = 0
    for program, group in itertools.groupby(chosen, lambda case: case.program):
        group = list(group)
        outcome = results(program, [case.test for case in group])
        for case in group:
            # A test that did not run, such as one that was renamed while this ran, has failed.
            result = outcome.get(case.test, "did not run")
            passed += result == "ok"
            print(f"{result:6}  {case.title} ({', '.join(case.reports)})", flush=True)
    failed = len(chosen) - passed
    print(f"reports: {passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
