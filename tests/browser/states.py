"""Error states: the daemon does not answer, no GPUs, evidence that is stuck, refusals, and a token that was replaced."""

from __future__ import annotations

import json
import re
import time

from browser import Watch, picture
from node import SHARED, Node
from page import drawer, menu, open_action, row, sign_in, view
from playwright.sync_api import Route, expect
from say import check, until


def _changed(watch: Watch, path: str, change) -> None:
    """The daemon's answer, changed as a test needs it."""

    def answer(route: Route) -> None:
        real = route.fetch()
        route.fulfill(status=200, content_type="application/json", body=json.dumps(change(real.json())))

    watch.page.route(path, answer)


def a_daemon_that_is_down_dims_everything_and_says_since_when(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node)
    expect(row(watch, 0)).to_be_visible()
    watch.lost = True
    page.route("**/api/v1/**", lambda route: route.abort())
    page.get_by_role("button", name="Tiles").click()
    expect(page.locator("#notices").get_by_role("alert")).to_contain_text("No answer from the daemon")
    age = page.locator("#age")
    expect(age).to_contain_text(re.compile(r"The state shown was loaded \d+s ago, at \d\d:\d\d:\d\d"))
    first = age.inner_text()
    until("an age that grows", lambda: page.evaluate("document.getElementById('age').textContent") != first, 5)
    shade = page.locator("#status-line").evaluate("(one) => getComputedStyle(one).filter + getComputedStyle(one).opacity")
    check("grayscale(1)" in shade and float(shade.split(")")[1]) < 0.8, f"what is old is shown as if it were not: {shade}")
    expect(page.locator("#pulse")).to_contain_text("no answer")
    item = menu(watch, 6).get_by_role("menuitem", name="Cordon…")
    expect(item).to_have_attribute("aria-disabled", "true")
    expect(item).to_contain_text("the daemon does not answer")
    page.keyboard.press("Escape")
    page.get_by_label("Select GPU 6", exact=True).check()
    expect(page.get_by_role("group", name="Selected GPUs").get_by_role("button", name="Drain…")).to_have_attribute("aria-disabled", "true")
    picture(page, "state-away")
    page.unroute("**/api/v1/**")
    expect(page.locator("#notices")).not_to_contain_text("No answer", timeout=25_000)
    check(page.locator("body.stale").count() == 0, "it is still dimmed")
    expect(menu(watch, 6).get_by_role("menuitem", name="Cordon…")).not_to_have_attribute("aria-disabled", "true")


def _counted(watch: Watch) -> list[str]:
    """The requests to the API from now on, besides the event stream."""
    requests: list[str] = []
    watch.page.on("request", lambda request: "/api/v1/" in request.url and not request.url.endswith("/events") and requests.append(request.url))
    return requests


def _problem(status: int, kind: str, title: str):
    """A handler that answers with a problem."""
    body = json.dumps({"type": f"/problems/{kind}", "title": title, "status": status, "detail": f"{title}, for this test"})
    return lambda route: route.fulfill(status=status, content_type="application/problem+json", body=body)


def a_daemon_that_is_away_gets_few_requests_with_a_drawer_open(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node, at=f"#gpu={node.gpus()[6]['uuid']}")
    expect(drawer(watch).get_by_role("button", name="24 hours")).to_be_visible()
    watch.lost = True
    page.route("**/api/v1/**", lambda route: route.abort())
    requests = _counted(watch)
    drawer(watch).get_by_role("button", name="24 hours").click()
    expect(page.locator("#notices").get_by_role("alert")).to_contain_text("No answer from the daemon")
    page.wait_for_timeout(3000)
    check(len(requests) <= 20, f"{len(requests)} requests in three seconds")
    # The part that could not be read says so.
    load = drawer(watch).locator("section", has=page.get_by_role("heading", name="Load", exact=True))
    expect(load).to_contain_text("the connection failed")


def a_refused_history_is_reported_in_its_section_and_not_requested_again_at_once(watch: Watch, node: Node) -> None:
    page = watch.page
    watch.allow(503)
    page.route("**/history?**", _problem(503, "busy", "Busy"))
    requests = _counted(watch)
    sign_in(watch, node, at=f"#view=timeline&gpu={node.gpus()[6]['uuid']}")
    expect(drawer(watch)).to_contain_text("Busy, for this test")
    expect(page.locator("#timeline")).to_contain_text("Busy, for this test")
    page.wait_for_timeout(3000)
    past = [url for url in requests if "/history?" in url]
    check(1 <= len(past) <= 4, f"{len(past)} requests for the past in three seconds")
    check(len(requests) <= 40, f"{len(requests)} requests in three seconds")
    expect(page.locator("#notices")).not_to_contain_text("Busy")
    check(page.locator("body.stale").count() == 0, "the page counts as old although only its past was refused")


def a_link_with_an_unknown_time_range_shows_an_hour(watch: Watch, node: Node) -> None:
    requests = _counted(watch)
    sign_in(watch, node, at=f"#gpu={node.gpus()[6]['uuid']}&last=7d")
    expect(drawer(watch).get_by_role("button", name="1 hour")).to_have_attribute("aria-pressed", "true")
    expect(drawer(watch).locator("figure", has_text="Memory").first).to_be_visible()
    check(not any("last=7d" in url for url in requests), "the daemon was asked for a time range that it does not have")


def a_caller_who_may_read_only_some_paths_gets_the_rest(watch: Watch, node: Node) -> None:
    page = watch.page
    watch.allow(403)
    for path in ("**/api/v1/access", "**/history?**"):
        page.route(path, _problem(403, "forbidden", "Not allowed"))
    sign_in(watch, node)
    expect(page.locator(".gpus tbody tr")).to_have_count(8)
    expect(page.locator("#notices")).not_to_contain_text("Not allowed")
    row(watch, 6).get_by_role("button", name="GPU 6", exact=True).click()
    expect(drawer(watch)).to_contain_text("No history: this daemon keeps none, or you may not read it.")
    view(watch, "Timeline")
    expect(page.locator("#timeline")).to_contain_text("No past events")


def a_gpu_that_gets_another_index_gets_its_name(watch: Watch, node: Node) -> None:
    page = watch.page
    swap: dict[int, int] = {}
    _changed(watch, "**/api/v1/gpus", lambda data: {**data, "items": [{**gpu, "index": swap.get(gpu["index"], gpu["index"])} for gpu in data["items"]]})
    sign_in(watch, node)
    uuid = node.gpus()[6]["uuid"]
    found = page.locator(f"tr[data-gpu='{uuid}']")
    expect(found).to_have_attribute("aria-label", "GPU 6")
    swap.update({6: 7, 7: 6})
    node.ask("PUT", f"/gpus/{node.gpus()[5]['uuid']}/cordon", {"reason": "so that the page reloads"})
    expect(found).to_have_attribute("aria-label", "GPU 7")
    expect(found.locator("button.open")).to_have_text("GPU 7")
    expect(found.get_by_label("Select GPU 7", exact=True)).to_have_count(1)
    found.get_by_role("button", name="Actions for GPU 7", exact=True).click()
    expect(page.get_by_role("menu", name="Actions for GPU 7", exact=True)).to_be_visible()
    node.ask("DELETE", f"/gpus/{node.gpus()[5]['uuid']}/cordon")


def a_browser_with_a_wrong_clock_shows_the_ages_of_the_daemon(watch: Watch, node: Node) -> None:
    page = watch.page
    page.add_init_script("const right = Date.now; Date.now = () => right() + 5 * 3_600_000;")
    sign_in(watch, node)
    check(page.evaluate("Date.now()") - time.time() * 1000 > 4 * 3_600_000, "the clock of the browser is right")
    # The daemon of this test has run for less than an hour.
    expect(row(watch, 0).locator(".since")).to_have_text(re.compile(r"^\d+[sm]$"))


def the_date_is_of_the_time_zone_of_the_time(watch: Watch, node: Node) -> None:
    page = watch.page
    page.context.new_cdp_session(page).send("Emulation.setTimezoneOverride", {"timezoneId": "Pacific/Auckland"})
    page.goto(f"{node.base}/")
    text = page.evaluate("async () => (await import('/page/dom.js')).time('2026-02-03T23:30:00Z')")
    check(text == "2026-02-04 12:30:00", f"half past noon of the fourth is {text}")
    expect(page.locator("#zone")).to_have_text(re.compile(r"^Times are local \(UTC\+1[23]\)\.$"))


def a_drain_that_was_given_up_needs_attention(watch: Watch, node: Node) -> None:
    page = watch.page
    marks = [{"owner": "api:admin", "kind": "cordon", "why": "fan", "since": "2026-01-01T00:00:00Z", "expired": True}]
    drain = {"state": "cordoned", "by": "admin", "why": "fan; drain given up at its deadline", "since": "2026-01-01T00:00:00Z", "marks": marks}
    _changed(watch, "**/api/v1/gpus", lambda data: {**data, "items": [{**gpu, "drain": drain} if gpu["index"] == 6 else gpu for gpu in data["items"]]})
    sign_in(watch, node)
    expect(row(watch, 6).locator(".reason")).to_have_text("drain given up; fan")
    expect(page.get_by_role("region", name="Status")).to_contain_text("1 GPU needs attention: GPU 6 has given up its drain")
    expect(page.get_by_role("group", name="States of GPUs").get_by_role("button", name="Need attention 1")).to_be_visible()


def a_drain_says_what_it_waits_for_without_pods(watch: Watch, node: Node) -> None:
    progress = {"evict": False, "atDeadline": "wait", "late": False, "allocations": [], "holders": []}
    left = {"processes": 0}

    def draining(data: dict) -> dict:
        drain = {"state": "draining", "by": "admin", "marks": [], "progress": {**progress, **left}}
        return {**data, "items": [{**gpu, "drain": drain} if gpu["index"] == 6 else gpu for gpu in data["items"]]}

    _changed(watch, "**/api/v1/gpus", draining)
    sign_in(watch, node)
    words = "no pod left; waiting until no process was seen for 10 s"
    expect(row(watch, 6)).to_contain_text(words)
    menu(watch, 6).get_by_role("menuitem", name="Progress of the drain…").click()
    expect(watch.page.get_by_role("dialog")).to_contain_text(words)
    left.clear()
    node.ask("PUT", f"/gpus/{node.gpus()[5]['uuid']}/cordon", {"reason": "so that the page reloads"})
    expect(watch.page.get_by_role("dialog")).to_contain_text("waiting for a minute, since processes cannot be seen")
    node.ask("DELETE", f"/gpus/{node.gpus()[5]['uuid']}/cordon")


def processes_that_cannot_be_seen_are_a_notice_after_a_while(watch: Watch, node: Node) -> None:
    page = watch.page
    why = "no GPU of this node lists its processes"
    _changed(watch, "**/api/v1/node", lambda data: {**data, "processes": {"state": "unsupported", "why": why}})
    page.clock.install()
    sign_in(watch, node)
    page.clock.run_for(2000)
    expect(row(watch, 0)).to_be_visible()
    notice = page.locator("#notices .notice", has_text="Processes cannot be seen")
    expect(notice).to_have_count(0)
    for _ in range(3):
        page.clock.fast_forward(16_000)
        page.wait_for_timeout(500)
    expect(notice).to_contain_text(f"drains wait for allocations only. {why}")


def policies_that_are_not_loaded_yet_say_so(watch: Watch, node: Node) -> None:
    page = watch.page
    waiting: list[Route] = []
    page.route("**/api/v1/stack", lambda route: waiting.append(route))
    sign_in(watch, node)
    view(watch, "Policies")
    expect(page.locator("#stack")).to_have_text("Loading…")
    expect(page.locator("#activations")).to_have_text("Loading…")
    page.unroute("**/api/v1/stack")
    for route in waiting:
        route.continue_()
    expect(page.locator("#stack")).to_contain_text("mixed")


def a_sign_out_leaves_no_names_and_requests_nothing(watch: Watch, node: Node) -> None:
    page = watch.page
    gpu = node.gpu_of("train-0")
    held = next(a for a in node.ask("GET", "/allocations?state=live&pod=train-0")[1]["items"] if gpu["uuid"] in a["gpus"])
    sign_in(watch, node, at=f"#gpu={gpu['uuid']}")
    drawer(watch).get_by_role("button", name="Explain: team-a/train-0").click()
    expect(drawer(watch).locator(".why-here")).to_be_visible()
    opened = "async (id) => !!(await import('/page/why-here.js')).opened(id)"
    check(page.evaluate(opened, held["id"]), "the explanation is not open")
    drawer(watch).get_by_role("button", name="Close").click()
    menu(watch, 6)
    page.evaluate("document.getElementById('sign-out').click()")
    expect(page.get_by_label("Token", exact=True)).to_be_focused()
    check(not page.evaluate(opened, held["id"]), "an explanation stayed")
    check(page.locator(".menu").count() == 0, "a menu stayed")
    requests = _counted(watch)
    page.wait_for_timeout(4000)
    check(not requests, f"requests after the sign-out: {requests[:5]}")


def a_node_without_gpus_says_what_to_do(watch: Watch, node: Node) -> None:
    page = watch.page
    why = "waiting: NVML cannot be loaded: libnvidia-ml.so.1: cannot open shared object file; install the driver"

    def no_gpus(data: dict) -> dict:
        checks = [{"name": "gpus", "ok": False, "detail": why}, *[c for c in data["checks"] if c["name"] != "gpus"]]
        return {**data, "ready": False, "checks": checks, "resources": [], "gpuSource": "nvml"}

    _changed(watch, "**/api/v1/node", no_gpus)
    _changed(watch, "**/api/v1/gpus", lambda data: {"items": []})
    sign_in(watch, node)
    notices = page.locator("#notices")
    expect(notices).to_contain_text("No GPU was found")
    expect(notices).to_contain_text("install the driver")
    expect(notices).to_contain_text("sudo berth node check")
    status = page.get_by_role("region", name="Status")
    expect(status).to_contain_text("Not ready: gpus")
    expect(status).to_contain_text("This node has no GPUs.")
    picture(page, "state-no-gpus")


def evidence_that_is_stuck_is_a_notice_with_its_age(watch: Watch, node: Node) -> None:
    page = watch.page
    since = page.evaluate("new Date(Date.now() - 25 * 60000).toISOString()")
    stuck = f"since {since}: the kubelet's checkpoint cannot be read; 3 allocations cannot end, so the GPUs of finished pods stay allocated"

    def hold(data: dict) -> dict:
        checks = [{**c, "detail": stuck} if c["name"] == "evidence" else c for c in data["checks"]]
        return {**data, "hold": "the kubelet's checkpoint cannot be read", "checks": checks}

    _changed(watch, "**/api/v1/node", hold)
    sign_in(watch, node)
    notice = page.locator("#notices .notice", has_text="No allocation can end (for 25m)")
    expect(notice).to_contain_text("3 allocations cannot end")
    check(page.locator("#notices .notice", has_text="checkpoint").count() == 1, "it is said twice")
    picture(page, "state-stuck")


def refusals_are_pinned_and_a_request_is_one_row(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node, at="#view=decisions")
    before = len(node.ask("GET", "/decisions?outcome=refused")[1]["items"])
    node.tell(f"run team-e/one-row-0 {SHARED} 1")
    until("the holder", lambda: node.ask("GET", "/allocations?pod=one-row-0")[1]["total"] == 1, 30)
    held = node.ask("GET", "/allocations?pod=one-row-0")[1]["items"][0]
    newest = page.get_by_role("table", name="Newest first", exact=True)
    mine = newest.locator("tbody tr", has_text="team-e/one-row-0")
    expect(mine).to_have_count(1, timeout=30_000)
    expect(mine).to_contain_text("granted")
    expect(mine).to_contain_text(f"1 × {SHARED} on GPU")
    seqs = {d["hook"] for d in node.ask("GET", f"/decisions?allocation={held['id']}")[1]["items"]}
    check("admit" in seqs, f"the request is not among the decisions: {seqs}")
    check(newest.locator("tbody tr", has_text="placement of").count() < 2, "placements stand alone")
    # A share of a GPU that is held whole is refused: the kubelet has no such free device, so no pod requests it.
    whole = node.ask("GET", "/allocations?pod=train-0")[1]["items"][0]
    try:
        node.tell(f"allocate {SHARED} {whole['gpus'][0]}::0")
    except Exception as refused:  # noqa: BLE001: the stand-in kubelet reports the refusal
        check("stand-in" in str(refused), str(refused))
    until("the refusal", lambda: len(node.ask("GET", "/decisions?outcome=refused")[1]["items"]) > before, 20)
    pinned = page.get_by_role("table", name="Refused, newest first")
    expect(pinned.locator("tbody tr").first).to_contain_text("refused", timeout=20_000)
    above = page.evaluate("() => { const [a, b] = document.querySelectorAll('#decisions table'); return a.classList.contains('refusals') && a.getBoundingClientRect().top < b.getBoundingClientRect().top; }")
    check(above, "refusals are not above")
    page.get_by_label("Search", exact=True).fill("refused")
    expect(newest).to_have_count(0)
    picture(page, "state-decisions")
    node.tell("end team-e/one-row-0")


def the_bar_says_who_is_here_and_how_fresh_it_is(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node)
    expect(page.locator("#who")).to_have_text("token admin: full control")
    expect(page.locator("#where")).to_contain_text("browser-node")
    expect(page.locator("#where")).to_contain_text(node.ask("GET", "/node")[1]["version"])
    clock = page.locator("#clock")
    expect(clock).to_have_text(re.compile(r"\d\d:\d\d:\d\d"))
    first = clock.inner_text()
    view(watch, "Pods")
    page.wait_for_timeout(1100)
    node.ask("PUT", f"/gpus/{node.gpus()[5]['uuid']}/cordon", {})
    until("a later time", lambda: page.evaluate("document.getElementById('clock').textContent") > first, 5)
    node.ask("DELETE", f"/gpus/{node.gpus()[5]['uuid']}/cordon")


def a_gpu_of_claims_says_so_and_what_its_move_waits_for(watch: Watch, node: Node) -> None:
    page = watch.page
    moving = node.gpu_of("train-0")
    held = {gpu for a in node.ask("GET", "/allocations?state=live&pod=train-0")[1]["items"] for gpu in a["gpus"]}
    other = next(gpu for gpu in node.gpus() if gpu["uuid"] not in held)
    wait = "allocation 5eed0001-17 has not ended"
    via = {"api": "devicePlugin", "state": "toDra", "by": "ann", "why": "new jobs", "waitsFor": wait}
    claim = {"namespace": "team-a", "name": "two-gpus", "uid": "1-2", "request": "gpu", "pods": ["train-0", "train-1"]}
    _changed(watch, "**/api/v1/node", lambda real: {**real, "dra": {"driver": "gpu.nvidia.com", "registered": True, "devices": 0}})
    _changed(watch, "**/api/v1/gpus", lambda real: {**real, "items": [
        {**one, "via": via} if one["uuid"] == moving["uuid"] else one for one in real["items"]]})
    _changed(watch, "**/api/v1/allocations?*", lambda real: {**real, "items": [
        {**one, "claim": claim} if (one.get("holder") or {}).get("pod") == "train-0" else one for one in real["items"]]})
    sign_in(watch, node)
    index = moving["index"]
    expect(row(watch, index)).to_contain_text("moving to DRA")
    expect(row(watch, index)).to_contain_text(wait)
    expect(row(watch, other["index"])).not_to_contain_text("DRA")
    page.get_by_label("Search").fill("two-gpus")
    expect(row(watch, index)).to_be_visible()
    expect(row(watch, other["index"])).to_be_hidden()
    page.get_by_label("Search").fill("")
    dialog = open_action(watch, index, "Cancel the move…")
    expect(dialog).to_contain_text("granted through the device plugin again at once")
    dialog.get_by_role("button", name="Cancel", exact=True).click()
    dialog = open_action(watch, other["index"], "Move to DRA…")
    dialog.get_by_label("Reason").fill("tried")
    # The daemon of this test has no API server.
    watch.allow(409)
    dialog.get_by_role("button", name="Move", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("only the API server shows when a GPU can be moved")
    picture(page, "state-move")
    dialog.get_by_role("button", name="Cancel", exact=True).click()
    row(watch, index).get_by_role("button", name=f"GPU {index}", exact=True).click()
    expect(drawer(watch)).to_contain_text(f"the device plugin, by ann: new jobs ({wait})")
    drawer(watch).get_by_role("button", name="Pod team-a/train-0").click()
    expect(drawer(watch)).to_contain_text("team-a/two-gpus, request gpu, for the pods train-0 and train-1")
    picture(page, "state-claim")


CASES = [
    a_daemon_that_is_down_dims_everything_and_says_since_when,
    a_daemon_that_is_away_gets_few_requests_with_a_drawer_open,
    a_refused_history_is_reported_in_its_section_and_not_requested_again_at_once,
    a_link_with_an_unknown_time_range_shows_an_hour,
    a_caller_who_may_read_only_some_paths_gets_the_rest,
    a_gpu_that_gets_another_index_gets_its_name,
    a_browser_with_a_wrong_clock_shows_the_ages_of_the_daemon,
    the_date_is_of_the_time_zone_of_the_time,
    a_drain_that_was_given_up_needs_attention,
    a_drain_says_what_it_waits_for_without_pods,
    a_gpu_of_claims_says_so_and_what_its_move_waits_for,
    processes_that_cannot_be_seen_are_a_notice_after_a_while,
    policies_that_are_not_loaded_yet_say_so,
    a_sign_out_leaves_no_names_and_requests_nothing,
    a_node_without_gpus_says_what_to_do,
    evidence_that_is_stuck_is_a_notice_with_its_age,
    refusals_are_pinned_and_a_request_is_one_row,
    the_bar_says_who_is_here_and_how_fresh_it_is,
]
