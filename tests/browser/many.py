"""A node that no simulation has: 64 GPUs and 1,024 devices, a policy that is suspended and one with faults.
The answers of the API are made up here; the page is the daemon's."""

from __future__ import annotations

import json
import time
from urllib.parse import urlsplit

from browser import Watch, picture
from node import SHARED, Node
from page import view
from playwright.sync_api import Route, expect
from say import check

GPUS, SHARES = 64, 16
MARKUP = '<script>window.__ran = 1</script><img src=x onerror="window.__ran = 2">'
PATHS = ["singleSwitch", "hostBridge", "sameNuma", "crossNuma"]
#: Longest until all rows are there, seconds, on two busy processors.
SHOWN_WITHIN = 10.0


def _uuid(i: int) -> str:
    return f"GPU-{i:08x}-0000-4000-8000-000000000000"


def _made_up(node: Node) -> dict[str, object]:
    """Answers by path, after the shape of the real ones."""
    paths = ("/node", "/stack", "/stack/history", "/decisions?limit=20")
    real = {path: node.ask("GET", path)[1] for path in paths}
    gpu = node.ask("GET", f"/gpus/{node.gpus()[0]['uuid']}")[1]
    summaries, answers, allocations = [], {}, []
    for i in range(GPUS):
        use = [{"resource": SHARED, "devices": SHARES, "held": SHARES, "free": 0}]
        summary = {**node.gpus()[0]} if i == 0 else {**summaries[0]}
        summary |= {"uuid": _uuid(i), "index": i, "resources": use, "memoryUsedMiB": 1200 * i}
        summaries.append(summary)
        devices = []
        for n in range(SHARES):
            allocation = f"5eed0001-{i * SHARES + n}"
            device = {"id": f"{_uuid(i)}::{n}", "resource": SHARED, "state": "held", "healthy": True}
            consumes = {"whole": False, "memoryMiB": summary["memoryMiB"] // SHARES, "computePercent": 100 // SHARES}
            devices.append({**device, "consumes": consumes, "allocations": [allocation]})
            name = MARKUP if n == 0 else f"a-pod-with-a-rather-long-name-{i}-{n}-7d9c6b5f4-x2x4z"
            holder = {"namespace": "a-namespace", "pod": name, "podUid": f"u{i}-{n}", "container": "main"}
            allocations.append({"id": allocation, "state": "live", "resource": SHARED, "devices": [device["id"]],
                                "gpus": [_uuid(i)], "grantedAt": "2026-01-01T00:00:00Z", "holder": holder,
                                "overlapped": False, "uses": [], "decision": {"by": ["baseline"]}})
        links = [{"gpu": _uuid(j), "path": PATHS[(i ^ j).bit_length() % 4], "nvlinks": 18 if i // 8 == j // 8 else 0}
                 for j in range(GPUS) if j != i]
        answers[f"/gpus/{_uuid(i)}"] = {**gpu, **summary, "parts": [{**gpu["parts"][0], "devices": devices}], "links": links}
    entry = real["/stack"]["entries"][0]
    hook = {"calls": 90, "passes": 0, "faults": 5, "p50Microseconds": 1, "p99Microseconds": 1, "worstMicroseconds": 1}
    record = {"calls": {"offer": 90}, "hooks": {"offer": hook}, "suspended": True,
              "faults": {"byKind": {"trap": 5}, "inARow": 5, "last": MARKUP}}
    faulty = {**record, "suspended": False, "faults": {"byKind": {"time": 1}, "inARow": 1, "last": "it took too long"}}
    entries = [{**entry, "policy": "broken", "record": record}, {**entry, "policy": "slow", "record": faulty}]
    decision = {"seq": 1, "at": "2026-01-01T00:00:00Z", "hook": "admit", "generation": 1, "gpus": [_uuid(3)], "candidates": [],
                "calls": [], "outcome": "denied", "by": ["quota@0123456789ab"], "reason": MARKUP, "answer": {},
                "request": {"resource": SHARED, "count": 1, "devices": []}}
    answers |= {
        "/node": {**real["/node"], "counts": {**real["/node"]["counts"], "gpus": GPUS, "workingGpus": GPUS}},
        "/gpus": {"items": summaries},
        "/stack": {**real["/stack"], "entries": entries},
        "/stack/history": real["/stack/history"],
        "/processes": {"items": [], "sight": {"state": "visible"}},
        "/access": {"caller": "token admin", "right": "change"},
        "/decisions": {**real["/decisions?limit=20"], "items": []},
        "/decisions?denied": {**real["/decisions?limit=20"], "items": [decision]},
        "/allocations": {"items": allocations[:500], "total": len(allocations), "next": "500"},
        "/allocations?500": {"items": allocations[500:1000], "total": len(allocations), "next": "1000"},
        "/allocations?1000": {"items": allocations[1000:], "total": len(allocations)},
    }
    return answers


def sixty_four_gpus_and_a_thousand_devices(watch: Watch, node: Node) -> None:
    page = watch.page
    answers = _made_up(node)

    def answer(route: Route) -> None:
        url = urlsplit(route.request.url)
        path = url.path.removeprefix("/api/v1")
        if path == "/events" or path.endswith("/history") and path != "/stack/history":
            return route.fulfill(status=404, body="{}")
        if path.endswith("/processes"):
            path = "/processes"
        if path == "/allocations" and "cursor=" in url.query:
            path += "?" + url.query.split("cursor=")[1].split("&")[0]
        if path == "/decisions" and "outcome=denied" in url.query:
            path += "?denied"
        route.fulfill(status=200, content_type="application/json", body=json.dumps(answers[path]))

    watch.allow(404)
    page.route("**/api/v1/**", answer)
    page.goto(f"{node.base}/")
    page.get_by_label("Token", exact=True).fill("made-up")
    start = time.monotonic()
    page.keyboard.press("Enter")
    # Not wait_for_function: it evaluates text, which the content security policy refuses.
    rows = page.locator(".gpus tbody tr")
    expect(rows).to_have_count(GPUS, timeout=60_000)
    took = time.monotonic() - start
    print(f"      {GPUS} rows and {GPUS * SHARES} devices after {took:.1f} s", flush=True)
    check(took < SHOWN_WITHIN, f"{took:.1f} s until the rows were there")
    view(watch, "Policies")
    expect(page.locator("#stack")).to_contain_text("suspended after 5 faults")
    expect(page.locator("#stack")).to_contain_text("1 fault, 1 in a row")
    view(watch, "Decisions")
    expect(page.locator("#decisions")).to_contain_text(MARKUP)
    view(watch, "Pods")
    expect(page.locator("#pods")).to_contain_text(MARKUP)
    check(page.evaluate("window.__ran") is None, "markup of a policy or a pod ran")
    check(page.locator("main script, main img").count() == 0, "markup of a policy or a pod became elements")
    view(watch, "GPUs")
    count = page.evaluate("document.querySelectorAll('*').length")
    check(count < 10_000, f"{count} elements")
    page.evaluate("window.scrollTo(0, 0)")
    picture(page, "many")
    # A poll without changes costs little.
    slow = page.evaluate("""async () => {
      const before = performance.now();
      document.getElementById('find').value = 'gpu 63';
      document.getElementById('find').dispatchEvent(new Event('input'));
      await new Promise((r) => requestAnimationFrame(() => setTimeout(r)));
      return performance.now() - before;
    }""")
    check(slow < 1000, f"finding takes {slow:.0f} ms")
    expect(page.locator(".gpus tbody tr:visible")).to_have_count(1)
    page.get_by_role("button", name="GPU 63", exact=True).click()
    page.locator("#drawer summary", has_text="device").click()
    expect(page.locator("#drawer table[role=table]", has_text="Devices of GPU 63").locator("tbody tr")).to_have_count(SHARES)
    page.keyboard.press("Escape")
    page.fill("#find", "")
    page.get_by_role("button", name="Tiles").click()
    expect(page.locator(".tile")).to_have_count(GPUS)
    view(watch, "Links")
    page.locator("#links svg").first.wait_for()
    picture(page, "many-links")
    view(watch, "GPUs")
    page.get_by_role("button", name="Table").click()
    page.set_viewport_size({"width": 360, "height": 740})
    wide = page.evaluate("document.documentElement.scrollWidth")
    check(wide <= 360, f"{wide} px wide on a phone")
    picture(page, "many-phone")


CASES = [sixty_four_gpus_and_a_thousand_devices]
