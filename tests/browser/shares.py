"""Who uses what: memory over its share, colours of namespaces and pods, and counts that leave nothing out unsaid.
The processes of simulated GPUs are in no pod: their use is made up here, in the shape of the real one."""

from __future__ import annotations

import json
import re

from browser import Watch, picture
from node import SHARED, Node
from page import drawer, row, sign_in, view
from playwright.sync_api import Route, expect
from say import check, until

OVER, LIMIT = 13_000, 8_192


def _holding(node: Node, pod: str) -> dict:
    """The allocation of a pod."""
    return node.ask("GET", f"/allocations?state=live&pod={pod}")[1]["items"][0]


def _uses(watch: Watch, uses: dict[str, list[dict]]) -> None:
    """What allocations use, by id."""

    def answer(route: Route) -> None:
        data = route.fetch().json()
        for allocation in data["items"]:
            allocation["uses"] = uses.get(allocation["id"], allocation["uses"])
        route.fulfill(status=200, content_type="application/json", body=json.dumps(data))

    watch.page.route("**/api/v1/allocations?*", answer)


def _use(gpu: str, used: int, limit: int = LIMIT) -> dict:
    return {"part": gpu, "memoryUsedMiB": used, "memoryLimitMiB": limit, "overLimit": used > limit, "pids": [4711]}


def use_over_its_share_is_seen_filtered_and_found(watch: Watch, node: Node) -> None:
    page = watch.page
    held = _holding(node, "notebook-0")
    index = node.gpu_of("notebook-0")["index"]
    _uses(watch, {held["id"]: [_use(held["gpus"][0], OVER)]})
    sign_in(watch, node)
    badge = row(watch, index).locator(".badge.warn", has_text="over its share")
    expect(badge).to_be_visible()
    status = page.get_by_role("region", name="Status")
    expect(status).to_contain_text(f"Over its share of memory: team-b/notebook-0/main on GPU {index} (12.7 / 8 GiB).")
    expect(status).to_have_class(re.compile("warn"))
    rows = page.locator(".gpus tbody tr:visible")
    page.get_by_role("group", name="States of GPUs").get_by_role("button", name="Over its share 1").click()
    expect(rows).to_have_count(1)
    expect(rows.first).to_have_attribute("aria-label", f"GPU {index}")
    page.get_by_role("group", name="States of GPUs").get_by_role("button", name="All").click()
    status.get_by_role("button", name="Over its share of memory").click()
    expect(rows).to_have_count(1)
    page.get_by_role("group", name="States of GPUs").get_by_role("button", name="All").click()
    page.get_by_label("Search", exact=True).fill("over its share")
    expect(rows).to_have_count(1)
    picture(page, "over-its-share")
    row(watch, index).get_by_role("button", name=f"GPU {index}", exact=True).click()
    holder = drawer(watch).get_by_role("list", name="Pods with devices of this GPU").get_by_role("listitem").filter(has_text="team-b/notebook-0")
    expect(holder).to_contain_text("memory used / limit 12.7 / 8 GiB ▲ over its share, for", use_inner_text=True)
    expect(holder.locator(".badge.warn")).to_be_visible()
    page.keyboard.press("Escape")
    view(watch, "Pods")
    expect(page.locator("#pods tbody tr")).to_have_count(1)
    expect(page.locator("#pods tbody tr")).to_contain_text(re.compile(r"12\.7 / 8 ▲ over its share"), use_inner_text=True)
    expect(page.locator("#pods tbody td").nth(4)).to_have_text("nothing")
    picture(page, "over-its-share-pods")


def use_over_a_share_of_several_gpus_names_the_gpu(watch: Watch, node: Node) -> None:
    page = watch.page
    held = _holding(node, "train-0")
    at = {gpu["uuid"]: gpu["index"] for gpu in node.gpus()}
    first, second = sorted(held["gpus"], key=at.get)
    _uses(watch, {held["id"]: [_use(first, 1024), _use(second, OVER)]})
    sign_in(watch, node, at="#view=pods")
    text = f"13.7 / 16 ▲ over its share of GPU {at[second]}: 12.7 / 8"
    expect(page.locator("#pods tbody tr", has_text="team-a/train-0")).to_contain_text(text, use_inner_text=True)
    page.get_by_role("button", name="Pod team-a/train-0", exact=True).click()
    expect(drawer(watch)).to_contain_text(f"13.7 / 16 GiB ▲ over its share of GPU {at[second]}: 12.7 / 8", use_inner_text=True)
    picture(page, "over-its-share-pod")
    page.keyboard.press("Escape")
    view(watch, "GPUs")
    expect(row(watch, at[second]).locator(".badge.warn")).to_have_text(re.compile("over its share"))
    expect(row(watch, at[first]).locator(".badge.warn")).to_have_count(0)


def colours_follow_from_names_alone(watch: Watch, node: Node) -> None:
    page = watch.page
    of = "async (names) => { const { colourOf } = await import('/page/words.js'); return Object.fromEntries(names.map((name) => [name, colourOf(name)])); }"
    names = ["team-a", "team-b", "team-c", "team-d", "ml-train", "notebooks", "inference", "batch", "research"]
    sign_in(watch, node)
    forward = page.evaluate(of, names)
    page.reload()
    page.locator("#views a").first.wait_for()
    backward = page.evaluate(of, names[::-1])
    check(forward == backward, f"the colours depend on the order: {forward} and {backward}")
    check(len(set(forward.values())) >= 6, f"most names have the same colours: {forward}")
    colour = lambda found: found.evaluate("(one) => getComputedStyle(one).backgroundColor")  # noqa: E731
    legend = page.get_by_role("list", name="Colours of namespaces").get_by_role("listitem")
    in_legend = {item.inner_text(): colour(item.locator(".dot")) for item in legend.all()}
    check(set(in_legend) >= {"team-a", "team-b", "team-c"}, f"{in_legend}")
    view(watch, "Pods")
    for name, shown in in_legend.items():
        check(colour(page.locator("#pods tbody tr", has_text=f"{name}/").first.locator(".dot")) == shown, f"{name} has another colour among the pods")
    # Pods in one graph have colours of their own, which no namespace has.
    palettes = page.evaluate("""() => {
        const of = (name) => { const dot = document.createElement('i'); dot.className = `dot ${name}`; document.body.append(dot);
            const colour = getComputedStyle(dot).backgroundColor; dot.remove(); return colour; };
        return [[...Array(16).keys()].map((n) => of(`ns-${n}`)), [...Array(6).keys()].map((n) => of(`line-${n}`))];
    }""")
    check(len(set(palettes[0])) == 16 and len(set(palettes[1])) == 6 and not set(palettes[0]) & set(palettes[1]), f"the palettes overlap: {palettes}")


def _history(watch: Watch, pods: list[tuple[str, int]]) -> None:
    """The last hour of each GPU, with the memory of these pods."""

    def answer(route: Route) -> None:
        real = route.fetch().json()
        stamps = watch.page.evaluate("Array.from({ length: 60 }, (_, i) => new Date(Date.now() - (60 - i) * 60000).toISOString())")
        items = [{"at": stamp, "memoryUsedMiB": 1024} for stamp in stamps]
        made = [{"namespace": "team", "pod": name, "items": [{"at": s, "memoryUsedMiB": mib} for s in stamps] if mib else [{"at": stamps[0], "utilizationPercent": 1}]} for name, mib in pods]
        route.fulfill(status=200, content_type="application/json", body=json.dumps({**real, "stepSeconds": 60, "items": items, "pods": made}))

    watch.page.route("**/history?last=1h&points=240", answer)


def a_graph_says_which_lines_it_leaves_out(watch: Watch, node: Node) -> None:
    page = watch.page
    _history(watch, [*[(f"pod-{n}", 1024 * (n + 1)) for n in range(8)], ("without-memory", 0)])
    sign_in(watch, node, at=f"#gpu={node.gpus()[6]['uuid']}")
    figure = drawer(watch).locator("figure", has_text="Memory by pod")
    expect(figure).to_contain_text("6 of 8 lines are drawn, those with the most memory. Only in the table: team/pod-1 and team/pod-0.")
    expect(figure.locator(".readout")).to_contain_text("team/without-memory: no reading")
    check(figure.locator("path.line").count() == 6, "not six lines")
    kinds = figure.locator("path.line").evaluate_all("(all) => all.map((one) => one.getAttribute('class'))")
    check(len(set(kinds)) == 6, f"two pods have one colour: {kinds}")
    figure.locator("summary").click()
    heads = figure.get_by_role("table").locator("thead th").all_inner_texts()
    check(len(heads) == 9, f"the table has {heads}")
    expect(figure.get_by_role("table").locator("caption")).to_contain_text("one of each 3 readings")
    before = dict(zip(figure.locator(".legend li").all_inner_texts(), kinds))
    # A pod keeps its colour when another one leaves, unless both have the same.
    page.unroute("**/history?last=1h&points=240")
    _history(watch, [(f"pod-{n}", 1024 * (n + 1)) for n in range(2, 7)])
    page.reload()
    figure = drawer(watch).locator("figure", has_text="Memory by pod")
    expect(figure.locator("path.line")).to_have_count(5)
    kinds = figure.locator("path.line").evaluate_all("(all) => all.map((one) => one.getAttribute('class'))")
    after = dict(zip(figure.locator(".legend li").all_inner_texts(), kinds))
    kept = [name for name in after if before[name] == after[name]]
    check(len(kept) >= 3, f"the colours changed: {before} and {after}")


def idle_is_what_a_new_pod_could_get(watch: Watch, node: Node) -> None:
    page = watch.page

    def answer(route: Route) -> None:
        data = route.fetch().json()
        for gpu in data["items"]:
            held = 0 if gpu["index"] < 4 else 1
            gpu["resources"] = [{**use, "held": held, "free": 1} for use in gpu["resources"]]
        lost, drained, *_ = data["items"]
        lost["health"] = {**lost["health"], "state": "vanished", "reason": "NVML no longer lists it"}
        drained["drain"] = {"state": "drained", "by": "admin", "marks": []}
        route.fulfill(status=200, content_type="application/json", body=json.dumps(data))

    page.route("**/api/v1/gpus", answer)
    sign_in(watch, node)
    chip = page.get_by_role("group", name="States of GPUs").get_by_role("button", name="Idle")
    expect(chip).to_have_text("Idle 2")
    chip.click()
    expect(page.locator(".gpus tbody tr:visible")).to_have_count(2)


def of_pods_with_as_many_devices_the_one_with_more_memory_is_first(watch: Watch, node: Node) -> None:
    """Two pods with a share each on one GPU: the later name uses more."""
    page = watch.page
    gpus = node.gpus()
    idle = next(gpu["uuid"] for gpu in gpus if all(use["held"] == 0 for use in gpu["resources"]))
    try:
        for gpu in gpus:
            if gpu["uuid"] != idle:
                node.ask("PUT", f"/gpus/{gpu['uuid']}/cordon", {"reason": "not this one"})
        for pod in ("team-e/a-first", "team-e/z-last"):
            node.tell(f"run {pod} {SHARED} 1")
        known = lambda: len([a for a in node.ask("GET", f"/allocations?state=live&gpu={idle}")[1]["items"] if (a.get("holder") or {}).get("pod")]) == 2  # noqa: E731
        until("both pods", known, 60)
        small, large = _holding(node, "a-first"), _holding(node, "z-last")
        _uses(watch, {small["id"]: [_use(idle, 1000)], large["id"]: [_use(idle, 3000)]})
        sign_in(watch, node)
        index = next(gpu["index"] for gpu in gpus if gpu["uuid"] == idle)
        expect(row(watch, index).locator(".top-pods button").first).to_contain_text("team-e/z-last")
    finally:
        for pod in ("team-e/a-first", "team-e/z-last"):
            node.tell(f"end {pod}")
        for gpu in gpus:
            node.ask("DELETE", f"/gpus/{gpu['uuid']}/cordon")


def a_text_cannot_turn_around_what_is_shown(watch: Watch, node: Node) -> None:
    """U+202E shows the rest of a line from right to left; the API takes such a reason."""
    page = watch.page
    uuid = node.gpus()[6]["uuid"]
    reason = "fan \u202elanoitarepo \u2066x\u2069"
    safe = "fan \\u{202e}lanoitarepo \\u{2066}x\\u{2069}"

    def answer(route: Route) -> None:
        data = route.fetch().json()
        for gpu in data["items"]:
            if gpu["uuid"] == uuid:
                gpu["drain"] = {"state": "cordoned", "by": "admin\u202e", "why": reason, "since": "2026-01-01T00:00:00Z",
                                "marks": [{"owner": "api:admin\u202e", "kind": "cordon", "why": reason, "since": "2026-01-01T00:00:00Z", "expired": False}]}
        route.fulfill(status=200, content_type="application/json", body=json.dumps(data))

    page.route("**/api/v1/gpus", answer)
    sign_in(watch, node, at=f"#gpu={uuid}")
    expect(row(watch, 6).locator(".reason")).to_have_text(safe)
    expect(row(watch, 6).locator(".reason")).to_have_attribute("title", safe)
    expect(drawer(watch)).to_contain_text(f"cordon by api:admin\\u{{202e}}: {safe}")
    drawer(watch).get_by_role("button", name="Uncordon…").click()
    expect(page.get_by_role("dialog")).to_contain_text(safe)
    found = page.evaluate("/[\\u202a-\\u202e\\u2066-\\u2069]/.test(document.documentElement.outerHTML)")
    check(not found, "a control character is in the page")
    page.keyboard.press("Escape")


CASES = [
    use_over_its_share_is_seen_filtered_and_found,
    use_over_a_share_of_several_gpus_names_the_gpu,
    colours_follow_from_names_alone,
    a_graph_says_which_lines_it_leaves_out,
    idle_is_what_a_new_pod_could_get,
    of_pods_with_as_many_devices_the_one_with_more_memory_is_first,
    a_text_cannot_turn_around_what_is_shown,
]
