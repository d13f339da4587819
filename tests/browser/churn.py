"""The page's resource use: its first load, and while it is open on a busy node."""

from __future__ import annotations

import time

from browser import Watch
from node import SHARED, SixteenGpuNode
from page import sign_in
from playwright.sync_api import expect
from say import check

#: Most bytes of the page's files at its first load, uncompressed.
FIRST_LOAD_MAX = 150_000
#: Allocations a second, and for how long processor time is measured.
RATE = 5
SECONDS = 30
#: Most processor time of the renderers for one allocation, in units: a busy machine, and a slow one, takes longer for both.
UNITS_MAX = 0.04
#: A unit: 60,000 elements are made and laid out.
UNIT = """() => {
    const box = document.createElement('div');
    box.style.cssText = 'position: absolute; visibility: hidden';
    document.body.append(box);
    let height = 0;
    for (let round = 0; round < 40; round++) {
        box.innerHTML = '<p><b>x</b><i>y</i></p>'.repeat(500);
        height += box.offsetHeight;
    }
    box.remove();
    return height;
}"""
#: Loads of the state in the simulated hour: a page loads each 15 seconds where no event is a reason.
LOADS = 225
#: How much the heap may grow in it beyond the first tenth, bytes: the page's own data is 0.5 MB.
GROWTH_MAX = 1_000_000


def the_first_load_is_small(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sizes: dict[str, int] = {}
    page.on("response", lambda response: "/api/" not in response.url and sizes.__setitem__(response.url, len(response.body())))
    sign_in(watch, node)
    expect(page.locator(".gpus tbody tr")).to_have_count(16)
    page.wait_for_timeout(1000)
    total = sum(sizes.values())
    print(f"      {len(sizes)} files of {total / 1000:.0f} kB in all, uncompressed", flush=True)
    check(total < FIRST_LOAD_MAX, f"the first load is {total} bytes")


def _renderer_seconds(watch: Watch) -> float:
    """Processor time of the renderers, seconds."""
    session = watch.page.context.browser.new_browser_cdp_session()
    processes = session.send("SystemInfo.getProcessInfo")["processInfo"]
    session.detach()
    return sum(process["cpuTime"] for process in processes if process["type"] == "renderer")


def _unit_seconds(watch: Watch) -> float:
    """Processor time of a unit, seconds."""
    before = _renderer_seconds(watch)
    watch.page.evaluate(UNIT)
    return _renderer_seconds(watch) - before


def _heap(session) -> dict[str, float]:
    """The heap after a collection, with elements and listeners."""
    session.send("HeapProfiler.collectGarbage")
    found = {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}
    return {name: found[name] for name in ("JSHeapUsedSize", "Nodes", "JSEventListeners")}


def a_busy_node_costs_little(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    page.set_viewport_size({"width": 1440, "height": 900})
    sign_in(watch, node)
    expect(page.locator(".gpus tbody tr")).to_have_count(16)
    page.wait_for_timeout(3000)
    units = [_unit_seconds(watch) for _ in range(2)]
    before, start, n = _renderer_seconds(watch), time.monotonic(), 0
    while time.monotonic() - start < SECONDS:
        # Each pod is an allocation, and ends five pods later.
        node.tell(f"run churn/pod-{n} {SHARED} 1")
        if n >= 5:
            node.tell(f"end churn/pod-{n - 5}")
        n += 1
        page.wait_for_timeout(max(0, (start + n / RATE - time.monotonic()) * 1000))
    took = time.monotonic() - start
    used = _renderer_seconds(watch) - before
    units = sorted(units + [_unit_seconds(watch) for _ in range(2)])
    unit = (units[1] + units[2]) / 2
    for left in range(n - 5, n):
        node.tell(f"end churn/pod-{left}")
    print(f"      {n / took:.1f} allocations a second: {used / took:.1%} of a core, {used / n / unit:.3f} units of {unit:.3f} s each", flush=True)
    check(n / took > RATE * 0.8, f"only {n / took:.1f} allocations a second were made")
    check(used / n / unit < UNITS_MAX, f"an allocation took {used / n / unit:.3f} units of processor time")
    check(page.locator(".gpus tbody tr").count() == 16, "rows are missing")


def an_hour_of_loads_leaks_no_memory(watch: Watch, node: SixteenGpuNode) -> None:
    """The page's clock is advanced by an hour, in which it loads the state each 16 seconds while pods come and go."""
    page = watch.page
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    page.clock.install()
    sign_in(watch, node)
    page.clock.run_for(2000)
    expect(page.locator(".gpus tbody tr")).to_have_count(16)
    loads = []
    page.on("request", lambda request: request.url.endswith("/api/v1/node") and loads.append(1))
    heaps, pods = [], 0
    for step in range(LOADS):
        if step % 10 == 0:
            # Another state: a pod comes, and the one before goes.
            node.tell(f"run hour/pod-{pods} {SHARED} 1")
            if pods > 0:
                node.tell(f"end hour/pod-{pods - 1}")
            pods += 1
        with page.expect_response(lambda response: response.url.endswith("/api/v1/gpus")):
            page.clock.fast_forward(3600 * 1000 // LOADS)
        page.wait_for_timeout(15)
        if step in (LOADS // 10, LOADS - 1):
            heaps.append(_heap(session))
    node.tell(f"end hour/pod-{pods - 1}")
    first, last = heaps
    print(f"      {len(loads)} loads: heap {first['JSHeapUsedSize'] / 1e6:.1f} MB, then {last['JSHeapUsedSize'] / 1e6:.1f} MB;"
          f" {first['Nodes']:.0f} and {last['Nodes']:.0f} nodes; {first['JSEventListeners']:.0f} and {last['JSEventListeners']:.0f} listeners", flush=True)
    check(len(loads) >= LOADS, f"only {len(loads)} loads")
    check(last["JSHeapUsedSize"] - first["JSHeapUsedSize"] < GROWTH_MAX, f"the heap grew: {first} {last}")
    check(last["JSEventListeners"] < first["JSEventListeners"] * 1.2 + 50, f"listeners stay: {first} {last}")
    check(last["Nodes"] < first["Nodes"] * 1.2 + 500, f"elements stay: {first} {last}")


CASES = [the_first_load_is_small, a_busy_node_costs_little, an_hour_of_loads_leaks_no_memory]
