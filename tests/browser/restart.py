"""A restart of the daemon: what it keeps, and since when it records what it keeps in memory. Last, since it gives the node another address."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from browser import Watch, picture
from node import SHARED, Node
from page import drawer, row, sign_in, view
from playwright.sync_api import expect
from say import TestError, check, until


def a_restart_is_shown_and_health_lasts_longer(watch: Watch, node: Node) -> None:
    page = watch.page
    gpu = node.gpus()[6]
    since = gpu["health"]["since"]
    node.quiet(1.1)
    node.restart()
    watch.base = node.base
    until("the daemon is ready", lambda: node.ask("GET", "/node")[1]["ready"], 60)
    started = node.ask("GET", "/node")[1]["startedAt"]
    check(since < started, f"the GPU was found at {since}, after the restart at {started}")
    check(node.gpus()[6]["health"]["since"] == since, f"the restart changed since when the GPU works: {node.gpus()[6]['health']}")
    sign_in(watch, node)
    expect(row(watch, 6).locator(".since")).to_have_attribute("datetime", since)
    expect(row(watch, 6).locator(".spark")).to_have_attribute("aria-label", re.compile(r"\(recorded since \d\d:\d\d:\d\d\)$"), timeout=60_000)
    expect(row(watch, 6).locator(".spark .unrecorded")).to_have_count(1)
    view(watch, "Timeline")
    noted = page.locator("#timeline", has_text=re.compile(r"Recorded since the daemon started at \d\d:\d\d:\d\d; what was before is not kept\."))
    expect(noted).to_be_visible()
    events = page.get_by_role("list", name="Events, newest first")
    expect(events.get_by_role("listitem").last).to_contain_text("The daemon started (Berth ")
    expect(page.locator(".lanes .unrecorded")).to_have_count(1)
    expect(page.locator(".lanes .recorded-from")).to_have_count(1)
    those_of_one_cause_share_a_line(watch, node)
    picture(page, "restart-timeline")
    row_of = f"#view=gpus&gpu={gpu['uuid']}"
    page.evaluate("(at) => { location.hash = at; }", row_of)
    until("readings", lambda: len(node.ask("GET", f"/gpus/{gpu['uuid']}/history?last=1h")[1]["items"]) > 0, 60)
    expect(drawer(watch)).to_contain_text("Recorded since the daemon started at")
    expect(drawer(watch).locator("figure .unrecorded").first).to_be_visible(timeout=60_000)
    expect(drawer(watch).get_by_role("img", name=re.compile("Memory, last 1h.*Recorded since")).first).to_be_visible()
    expect(drawer(watch)).to_contain_text(re.compile(r"events? of it in the last 24 hours.*\(recorded since"))
    picture(page, "restart-drawer")
    page.keyboard.press("Escape")
    view(watch, "Policies")
    expect(page.locator("#stack")).to_contain_text("when the daemon started.")


#: Read at once, since the list is made again when an event comes.
LINES_AND_STATUS = "[document.querySelectorAll('#timeline ol.timeline > li').length, document.querySelector('#timeline [role=status]').textContent]"


def those_of_one_cause_share_a_line(watch: Watch, node: Node) -> None:
    """On a busy machine events of one cause may be too far apart to share a line: the API's times show which are not."""

    def is_so() -> bool:
        kept = node.ask("GET", "/events/history?last=1h")[1]["items"]
        joined = sum(shares_line(newer, older) for newer, older in zip(kept, kept[1:]))
        lines, status = watch.page.evaluate(LINES_AND_STATUS)
        listed = int(re.match(r"(\d+) events? in", status)[1])
        seen.update(joined=joined, lines=lines, status=status)
        says = f", in {lines} lines, since those of one cause share a line" in status
        return lines == listed - joined and says == (joined > 0)

    seen = {}
    try:
        until("those of one cause share a line", is_so)
    except TestError as late:
        raise TestError(f"{late}: {seen}") from None


def shares_line(newer: dict, older: dict) -> bool:
    """Whether neighbours in the list are of one start of the daemon: GPUs that it found, or policies that came with it."""
    are_found = all(event["kind"] == "gpuFound" for event in (newer, older))
    are_shipped = all(event["kind"] == "policyUploaded" and "came with the daemon" in event["words"] for event in (newer, older))
    apart = at(newer) - at(older)
    return (are_found or are_shipped) and apart <= timedelta(seconds=2)


def at(event: dict) -> datetime:
    return datetime.fromisoformat(event["at"].replace("Z", "+00:00"))


def decisions_of_pods_that_ended_name_them(watch: Watch, node: Node) -> None:
    page = watch.page
    node.tell(f"run team-f/ended-0 {SHARED} 1")
    until("its holder", lambda: any((a.get("holder") or {}).get("pod") for a in node.ask("GET", "/allocations?state=live&pod=ended-0")[1]["items"]), 60)
    node.tell("end team-f/ended-0")
    until("its end", lambda: node.ask("GET", "/allocations?state=live&pod=ended-0")[1]["total"] == 0, 60)
    sign_in(watch, node, at="#view=decisions")
    mine = page.get_by_role("table", name="Newest first", exact=True).locator("tbody tr", has_text="team-f/ended-0/main")
    expect(mine).to_have_count(1)
    expect(mine).to_contain_text("granted")


def a_countdown_moves_each_second(watch: Watch, node: Node) -> None:
    page = watch.page
    gpu = node.gpu_of("train-0")
    node.ask("PUT", f"/gpus/{gpu['uuid']}/drain", {"reason": "slow", "deadlineSeconds": 3000})
    try:
        sign_in(watch, node)
        left = row(watch, gpu["index"]).locator(".countdown")
        expect(left).to_have_text(re.compile(r"^\d+m( \d+s)?$"))
        loads = []
        page.on("request", lambda request: request.url.endswith("/api/v1/gpus") and loads.append(1))
        seen = set()

        def moved() -> bool:
            seen.add(page.evaluate("document.querySelector('.countdown')?.textContent"))
            return len(seen) >= 4

        # A load is each 15 seconds.
        until("four times", moved, 30)
        check(len(loads) <= 2, f"{len(loads)} loads for {seen}")
        seconds = [int(m[1] or 0) * 60 + int(m[2] or 0) for m in (re.match(r"(?:(\d+)m)? ?(?:(\d+)s)?", text) for text in seen)]
        check(max(seconds) - min(seconds) <= 30 and max(seconds) <= 3000, f"it jumps: {seen}")
    finally:
        node.ask("DELETE", f"/gpus/{gpu['uuid']}/cordon")


CASES = [decisions_of_pods_that_ended_name_them, a_countdown_moves_each_second, a_restart_is_shown_and_health_lasts_longer]
