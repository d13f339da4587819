"""Time: the line of the last hour, graphs of GPUs and pods, and the timeline of events."""

from __future__ import annotations

import json
import re
import time

from browser import Watch, picture
from node import SHARED, SixteenGpuNode
from page import address, drawer, row, sign_in, view
from playwright.sync_api import expect
from say import check, until


def each_gpu_has_a_line_of_the_last_hour(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sign_in(watch, node)
    line = row(watch, 8).get_by_role("img", name=re.compile("in the last hour"))
    expect(line).to_be_visible()
    check(len(line.locator("path").get_attribute("d")) > 3, "the line is empty")
    busy = next(gpu for gpu in node.gpus() if gpu["index"] == 8).get("utilizationPercent")
    check(busy is not None, "the daemon reports no utilisation of a simulated GPU")
    expect(row(watch, 8).locator(".now")).to_have_text(re.compile(r"\d+ %"))


def a_gpu_has_graphs_with_their_values_as_tables(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    uuid = node.gpus()[8]["uuid"]
    sign_in(watch, node, at=f"#gpu={uuid}")
    until("some readings", lambda: len(node.ask("GET", f"/gpus/{uuid}/history?last=1h")[1]["items"]) > 0, 60)
    for title, unit in [("Memory", "GiB"), ("Utilisation", "%"), ("Temperature", "°C"), ("Power", "W")]:
        figure = drawer(watch).locator("figure", has_text=title).first
        expect(figure).to_be_visible()
        said = figure.get_by_role("img").get_attribute("aria-label")
        check(title in said and unit in said and "between" in said, f"{title}: {said}")
        check(figure.locator("path.line").count() >= 1, f"{title} has no line")
        figure.locator("summary").click()
        expect(figure.get_by_role("table").locator("tbody tr").first).to_be_visible()
    with page.expect_request(lambda request: "history?last=24h" in request.url):
        drawer(watch).get_by_role("button", name="24 hours").click()
    check("last=24h" in address(watch), "the time range is not in the address")
    expect(drawer(watch).get_by_role("button", name="24 hours")).to_have_attribute("aria-pressed", "true")
    expect(drawer(watch).get_by_role("img", name=re.compile("^Memory, last 24h"))).to_be_visible()
    picture(page, "graphs")


def a_gpu_that_is_no_longer_read_has_no_present_value(watch: Watch, node: SixteenGpuNode) -> None:
    """A made-up past of which the last half hour is missing."""
    page = watch.page
    uuid = node.gpus()[3]["uuid"]
    real = node.ask("GET", f"/gpus/{uuid}/history?last=1h")[1]

    def answer(route) -> None:
        stamps = page.evaluate("Array.from({ length: 30 }, (_, i) => new Date(Date.now() - (60 - i) * 60000).toISOString())")
        items = [{"at": stamp, "memoryUsedMiB": 0} for stamp in stamps]
        route.fulfill(status=200, content_type="application/json", body=json.dumps({**real, "stepSeconds": 60, "items": items, "pods": []}))

    page.route("**/history?last=1h&points=240", answer)
    sign_in(watch, node, at=f"#gpu={uuid}")
    figure = drawer(watch).locator("figure", has_text="Memory").first
    expect(figure.locator(".readout")).to_have_text(re.compile(r"^in use: no reading since \d\d:\d\d; granted: no reading$"))


def memory_is_drawn_by_pod(watch: Watch, node: SixteenGpuNode) -> None:
    """The processes of simulated GPUs are in no pod: the answer is made up here, in the shape of the real one."""
    page = watch.page
    gpu = node.gpus()[8]
    held = node.ask("GET", f"/allocations?gpu={gpu['uuid']}")[1]["items"][0]["holder"]
    real = node.ask("GET", f"/gpus/{gpu['uuid']}/history?last=1h")[1]
    at = [f"2026-01-01T00:{minute:02d}:00.000Z" for minute in range(60)]

    def answer(route) -> None:
        now = page.evaluate("Date.now()")
        stamps = page.evaluate("(now) => Array.from({ length: 60 }, (_, i) => new Date(now - (60 - i) * 60000).toISOString())", now)
        samples = [{"at": stamp, "memoryUsedMiB": 1024 + 64 * i} for i, stamp in enumerate(stamps)]
        pods = [{"namespace": held["namespace"], "pod": held["pod"], "items": samples}, {"namespace": "other", "pod": "short", "items": samples[40:]}]
        route.fulfill(status=200, content_type="application/json", body=json.dumps({**real, "stepSeconds": 60, "pods": pods}))

    check(len(at) == 60 and set(real) == {"stepSeconds", "items", "pods"}, f"the shape is {set(real)}")
    page.route("**/history?last=1h&points=240", answer)
    sign_in(watch, node, at=f"#gpu={gpu['uuid']}")
    figure = drawer(watch).locator("figure", has_text="Memory by pod")
    name = f"{held['namespace']}/{held['pod']}"
    expect(figure).to_contain_text(name)
    expect(figure).to_contain_text("other/short")
    check(figure.locator("path.line").count() == 2, "not a line for each pod")
    drawer(watch).get_by_role("button", name=f"Pod {name}", exact=True).click()
    expect(drawer(watch).get_by_role("img", name=re.compile(f"on GPU {gpu['index']}: 4.7 GiB, between 1 and 4.7"))).to_be_visible()


def the_timeline_has_the_events_of_an_hour_and_a_day(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sign_in(watch, node, at="#view=timeline")
    events = page.get_by_role("list", name="Events, newest first")
    expect(events).to_contain_text("GPU 12 is unhealthy: XID 79")
    expect(events).to_contain_text("GPU 9 is cordoned by admin (fan replacement)")
    lanes = page.get_by_role("img", name=re.compile(r"^Events of the last 1h: \d+ health, \d+ drains"))
    expect(lanes).to_be_visible()
    hour = events.get_by_role("listitem").count()
    check(lanes.locator("circle").count() >= hour, "the picture has fewer events than the list")
    # What one start makes is one line.
    expect(events.locator("summary", has_text=re.compile(r"^\d+ GPUs were found$"))).to_have_count(1)
    expect(events.locator("summary", has_text="policies came with the daemon")).to_have_count(1)
    drains = page.get_by_role("group", name="Kinds of event").get_by_role("button", name="Drains")
    drains.click()
    expect(drains).to_have_attribute("aria-pressed", "true")
    until("only drains", lambda: all("Drains" in text for text in events.get_by_role("listitem").all_inner_texts()), 5)
    drains.click()
    expect(events).to_contain_text("GPU 12 is unhealthy: XID 79")
    page.get_by_role("button", name="24 hours").click()
    expect(page.get_by_role("img", name=re.compile("^Events of the last 24h"))).to_be_visible()
    until("as many events as in an hour", lambda: events.get_by_role("listitem").count() >= hour, 5)
    page.get_by_label("Search", exact=True).fill("gpu 9")
    until("only events of GPU 9", lambda: all("GPU 9" in text for text in events.get_by_role("listitem").all_inner_texts()), 5)
    events.get_by_role("button", name="GPU 9").first.click()
    expect(page.get_by_role("complementary", name="GPU 9")).to_be_visible()


def a_new_event_is_in_the_timeline_within_seconds(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sign_in(watch, node, at="#view=timeline")
    events = page.get_by_role("list", name="Events, newest first")
    expect(events).to_contain_text("GPU 12 is unhealthy")
    uuid = node.gpus()[15]["uuid"]
    node.ask("PUT", f"/gpus/{uuid}/cordon", {"reason": "seen in the timeline"})
    expect(events.get_by_role("listitem").first).to_contain_text("seen in the timeline", timeout=5000)
    node.ask("DELETE", f"/gpus/{uuid}/cordon")
    expect(events.get_by_role("listitem").first).to_contain_text("GPU 15", timeout=5000)
    # What pods come and go is not in it.
    node.tell(f"run other/short-lived {SHARED} 1")
    page.wait_for_timeout(1500)
    check("short-lived" not in events.inner_text(), "a grant is in the timeline")
    node.tell("end other/short-lived")


def events_are_requested_once_and_none_is_lost_meanwhile(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    uuid = node.gpus()[14]["uuid"]
    requested = []

    def slowly(route) -> None:
        requested.append(route.request.url)
        old = route.fetch()
        node.ask("PUT", f"/gpus/{uuid}/cordon", {"reason": "while it was read"})
        # The event of the stream is there before this answer.
        time.sleep(1.5)
        route.fulfill(response=old)

    page.route("**/events/history?**", slowly)
    # Both the view and the drawer need them.
    sign_in(watch, node, at=f"#view=timeline&gpu={uuid}")
    events = page.get_by_role("list", name="Events, newest first")
    expect(events).to_contain_text("while it was read")
    expect(events.get_by_role("listitem").filter(has_text="while it was read")).to_have_count(1)
    expect(drawer(watch)).to_contain_text("while it was read")
    check(len(requested) == 1, f"the events were requested {len(requested)} times")
    node.ask("DELETE", f"/gpus/{uuid}/cordon")


def a_gpu_that_was_forgotten_leaves_the_others_their_history(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    watch.allow(404)
    # The first in the list of the page, which is requested first.
    first = node.gpus()[0]["uuid"]
    problem = {"type": "/problems/unknown-gpu", "title": "No such GPU", "status": 404, "detail": "none"}
    page.route(f"**/gpus/{first}/history?**", lambda route: route.fulfill(status=404, content_type="application/problem+json", body=json.dumps(problem)))
    sign_in(watch, node)
    expect(row(watch, 8).locator(".spark")).to_be_visible()
    expect(row(watch, 0).locator(".spark")).to_have_count(0)
    row(watch, 8).get_by_role("button", name="GPU 8", exact=True).click()
    expect(drawer(watch).locator("figure", has_text="Memory").first).to_be_visible()


def a_daemon_without_history_shows_no_graph_and_no_error(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    watch.allow(404)
    problem = {"type": "/problems/no-such-route", "title": "No such route", "status": 404, "detail": "none"}
    missing = lambda route: route.fulfill(status=404, content_type="application/problem+json", body=json.dumps(problem))  # noqa: E731
    for path in ("**/history?**", "**/api/v1/access"):
        page.route(path, missing)
    requested = []
    page.on("request", lambda request: "/history?" in request.url and "/gpus/" in request.url and requested.append(request.url))
    sign_in(watch, node)
    expect(page.locator(".gpus tbody tr")).to_have_count(16)
    expect(page.locator(".spark")).to_have_count(0)
    row(watch, 8).get_by_role("button", name="GPU 8", exact=True).click()
    expect(drawer(watch)).to_contain_text("No history: this daemon keeps none")
    view(watch, "Timeline")
    expect(page.locator("#timeline")).to_contain_text("No past events: this daemon keeps none")
    expect(page.locator("#notices")).not_to_contain_text("No such route")
    check(len(requested) == 1, f"what the daemon does not have was requested {len(requested)} times")


CASES = [
    each_gpu_has_a_line_of_the_last_hour,
    a_gpu_has_graphs_with_their_values_as_tables,
    a_gpu_that_is_no_longer_read_has_no_present_value,
    memory_is_drawn_by_pod,
    the_timeline_has_the_events_of_an_hour_and_a_day,
    a_new_event_is_in_the_timeline_within_seconds,
    events_are_requested_once_and_none_is_lost_meanwhile,
    a_gpu_that_was_forgotten_leaves_the_others_their_history,
    a_daemon_without_history_shows_no_graph_and_no_error,
]
