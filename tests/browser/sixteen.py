"""The page on a node of 16 GPUs with 10 shares each, of which four are bad: what an operator finds at a glance."""

from __future__ import annotations

import json
import re

from browser import Watch, picture
from node import SHARED, SixteenGpuNode
from page import address, drawer, expect_no_horizontal_scroll, menu, row, sign_in, view
from playwright.sync_api import Route, expect
from say import check, until


def _order(watch: Watch) -> list[int]:
    """The indices of the GPUs that are shown, from above."""
    names = watch.page.locator(".gpus tbody tr:visible").evaluate_all("(rows) => rows.map((r) => r.getAttribute('aria-label'))")
    return [int(name.removeprefix("GPU ")) for name in names]


def _shown(watch: Watch, indices: list[int]) -> None:
    until(f"only the GPUs {indices}", lambda: sorted(_order(watch)) == sorted(indices), 5)


def the_status_line_says_what_is_wrong_and_filters(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sign_in(watch, node)
    status = page.get_by_role("region", name="Status")
    expect(status).to_contain_text("4 GPUs need attention: GPUs 3 and 12 fell off the bus, GPU 5 vanished, GPU 7 needs a reset")
    expect(status).to_contain_text("1 GPU cordoned, draining or drained")
    status.get_by_role("button", name="GPUs 3 and 12 fell off the bus").click()
    _shown(watch, [3, 12])
    expect(page.locator("#found")).to_have_text("2 of 16 GPUs match")
    status.get_by_role("button", name="4 GPUs need attention").click()
    _shown(watch, [3, 5, 7, 12])
    page.go_back()
    _shown(watch, [3, 12])
    status.get_by_role("button", name="1 GPU cordoned, draining or drained").click()
    _shown(watch, [9])


def bad_gpus_are_first_and_sixteen_fit_on_one_screen(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    page.set_viewport_size({"width": 1440, "height": 900})
    sign_in(watch, node)
    expect(page.locator(".gpus tbody tr")).to_have_count(16)
    good = [i for i in range(16) if i not in (3, 5, 7, 12, 9)]
    check(_order(watch) == [3, 5, 7, 12, 9, *good], f"the order is {_order(watch)}")
    bottom = page.locator(".gpus tbody tr").last.evaluate("(r) => r.getBoundingClientRect().bottom")
    check(bottom <= 900, f"the last row ends at {bottom:.0f} px")
    high = page.evaluate("document.documentElement.scrollHeight")
    check(high <= 900, f"the page is {high} px high")
    expect_no_horizontal_scroll(watch, "at 1440")
    cut = page.locator(".gpus .amount, .gpus .open").evaluate_all("(all) => all.filter((one) => one.scrollWidth > one.clientWidth + 1).length")
    check(cut == 0, f"{cut} numbers do not fit in their columns")


def counters_filter_and_a_link_shows_the_same(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sign_in(watch, node)
    chips = page.get_by_role("group", name="States of GPUs")
    expect(chips.get_by_role("button", name="All 16")).to_have_attribute("aria-pressed", "true")
    for name in ("Need attention 4", "Vanished 1", "Unhealthy 3", "Cordoned 1", "Healthy 12", "Open 11"):
        expect(chips.get_by_role("button", name=name)).to_be_visible()
    chips.get_by_role("button", name="Unhealthy 3").click()
    _shown(watch, [3, 7, 12])
    chips.get_by_role("button", name="Vanished 1").click()
    _shown(watch, [3, 5, 7, 12])
    page.get_by_label("Search", exact=True).fill("H100")
    until("the search in the address", lambda: "q=H100" in address(watch), 5)
    wanted = sorted(_order(watch))
    row(watch, 7).get_by_role("button", name="GPU 7", exact=True).click()
    expect(drawer(watch)).to_contain_text("needs a reset")
    link = address(watch)
    check("state=unhealthy%2Cvanished" in link and "gpu=GPU-" in link, f"the address is {link}")
    # A reload keeps the token of this tab.
    page.reload()
    expect(drawer(watch)).to_contain_text("needs a reset")
    expect(page.get_by_label("Search", exact=True)).to_have_value("H100")
    _shown(watch, wanted)
    # Someone else has to sign in first, and then sees the same.
    page.evaluate("sessionStorage.clear()")
    page.goto("about:blank")
    page.goto(link)
    page.get_by_label("Token", exact=True).fill(node.token)
    page.keyboard.press("Enter")
    expect(drawer(watch)).to_contain_text("needs a reset")
    _shown(watch, wanted)


def capacity_adds_up_and_says_why(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sign_in(watch, node)
    table = page.get_by_role("table", name="Resources")
    cells = table.locator("tbody tr").first.locator("td").all_inner_texts()
    heads = table.locator("thead th").all_inner_texts()
    numbers = {head: int(cell.replace("–", "0")) for head, cell in zip(heads, cells) if re.fullmatch(r"\d+|–", cell)}
    check(numbers["Devices"] == 160, f"{numbers}")
    parts = ["Held", "Free", "Withdrawn", "Cordoned", "Unhealthy"]
    check(sum(numbers[part] for part in parts) == 160, f"the numbers do not add up: {numbers}")
    check(numbers["Unhealthy"] > 0 and numbers["Cordoned"] > 0, f"{numbers}")
    page.get_by_text("neither held nor free").click()
    reasons = page.locator(".reasons")
    expect(reasons).to_contain_text("fan replacement")
    # The same reason is there once, with all GPUs that have it.
    texts = reasons.get_by_role("listitem").all_inner_texts()
    said = [re.sub(r"^\d+ | on GPU[^:]*", "", text) for text in texts]
    check(len(set(said)) == len(said), f"a reason is repeated: {texts}")
    reasons.get_by_role("button", name="GPU 3").click()
    expect(drawer(watch).get_by_role("heading", name="GPU 3", exact=True)).to_be_visible()


def shares_have_colours_and_a_text(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sign_in(watch, node)
    of = node.ask("GET", f"/allocations?gpu={node.gpus()[0]['uuid']}")[1]["items"]
    spaces = {a["holder"]["namespace"] for a in of}
    picture_of = row(watch, 0).get_by_role("img", name="10 shares")
    text = picture_of.get_attribute("aria-label")
    for space in spaces:
        check(space in text, f"{space} is not in {text!r}")
    check("free" in text, text)
    kinds = picture_of.locator("path").evaluate_all("(all) => all.map((one) => getComputedStyle(one).fill)")
    check(len(set(kinds)) == len(spaces) + 1, f"{len(set(kinds))} colours for {spaces} and free ones")
    legend = page.get_by_role("list", name="Colours of namespaces")
    expect(legend.get_by_role("listitem")).to_have_count(5)
    expect(row(watch, 3).get_by_role("img", name="10 shares")).to_have_attribute("aria-label", re.compile("withdrawn"))


def a_search_finds_what_is_meant(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sign_in(watch, node)
    find = page.get_by_label("Search", exact=True)
    for text, indices in [
        ("gpu 1", [1]),
        ("unhealthy", [3, 7, 12]),
        ("lost", [3, 5, 12]),
        ("reset", [7]),
        ("fan", [9]),
        ("GPU 12", [12]),
        ("nothing-like-this", []),
    ]:
        find.fill(text)
        _shown(watch, indices)
    find.fill("healthy")
    until("no unhealthy GPU", lambda: not {3, 5, 7, 12} & set(_order(watch)), 5)
    find.fill("free")
    until("only GPUs with a free share", lambda: len(_order(watch)) == 11, 5)
    pod = node.ask("GET", "/allocations?limit=1")[1]["items"][0]
    name = f"{pod['holder']['namespace']}/{pod['holder']['pod']}"
    by_uuid = {g["uuid"]: g["index"] for g in node.gpus()}
    find.fill(name)
    held = sorted(by_uuid[uuid] for uuid in pod["gpus"])
    _shown(watch, held)
    # Its rows name the pod that was found, whichever holds most.
    for index in held:
        expect(row(watch, index).get_by_role("button", name=f"Pod {name}", exact=True)).to_be_visible()
    first = _order(watch)[0]
    find.press("Enter")
    expect(page.get_by_role("button", name=f"GPU {first}", exact=True)).to_be_focused()
    view(watch, "Pods")
    expect(page.locator("#pods tbody tr")).to_have_count(1)
    expect(page.locator("#pods tbody")).to_contain_text(name)


def the_layout_can_be_tiles(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sign_in(watch, node)
    page.get_by_role("button", name="Tiles").click()
    tiles = page.get_by_role("article")
    expect(tiles).to_have_count(16)
    expect(tiles.first).to_contain_text("fell off the bus")
    check("layout=tiles" in address(watch), "the layout is not in the address")
    page.get_by_role("article", name="GPU 9", exact=True).get_by_role("button", name="Actions for GPU 9").click()
    expect(page.get_by_role("menuitem", name="Uncordon…")).to_be_visible()
    page.keyboard.press("Escape")
    picture(page, "tiles")
    page.get_by_role("button", name="Table").click()
    expect(page.locator(".gpus tbody tr")).to_have_count(16)


def a_gpu_has_a_drawer_with_an_address(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    gpu = node.gpus()[12]
    sign_in(watch, node, at=f"#gpu={gpu['uuid']}")
    opened = page.get_by_role("complementary", name="GPU 12")
    expect(opened).to_be_visible()
    for title in ("Overview", "Holders", "Load", "Processes", "History", "Devices", "Links to other GPUs"):
        expect(opened.get_by_role("heading", level=3, name=title, exact=True)).to_be_visible()
    expect(opened).to_contain_text("unhealthy: XID 79")
    health = gpu["health"]
    when = "if no error comes until then" if health.get("healsAt") else "once a scan finds it working, or some minutes later"
    expect(opened).to_contain_text(when if health["heals"] else "only by an operator, after the repair")
    expect(opened).to_contain_text(gpu["uuid"])
    expect(opened.get_by_role("table", name="Health, newest first").locator("tbody tr")).to_have_count(2)
    expect(opened).to_contain_text("18 NVLinks")
    holders = {f"{a['holder']['namespace']}/{a['holder']['pod']}" for a in node.ask("GET", f"/allocations?gpu={gpu['uuid']}")[1]["items"]}
    for holder in holders:
        expect(opened.get_by_role("button", name=f"Pod {holder}", exact=True)).to_be_visible()
    opened.locator("summary", has_text="10 devices").click()
    expect(opened.get_by_role("table", name="Devices of GPU 12").locator("tbody tr")).to_have_count(10)
    page.keyboard.press("Escape")
    expect(opened).to_be_hidden()
    check("gpu=" not in address(watch), "the address still names the GPU")
    expect(page.get_by_role("button", name="GPU 12", exact=True)).to_be_focused()
    # A GPU with processes, whose memory they use.
    row(watch, 8).get_by_role("button", name="GPU 8", exact=True).click()
    expect(drawer(watch).get_by_role("table", name="Processes on this GPU")).to_contain_text("4200008")
    # One that is not of this node.
    page.evaluate("location.hash = '#gpu=GPU-00000000-0000-4000-8000-000000000000'")
    expect(drawer(watch)).to_contain_text("This node has no GPU GPU-00000000")


def a_pod_shows_why_it_got_its_gpu(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    gpu = node.gpus()[3]
    sign_in(watch, node, at=f"#gpu={gpu['uuid']}")
    held = node.ask("GET", f"/allocations?gpu={gpu['uuid']}")[1]["items"][0]
    name = f"{held['holder']['namespace']}/{held['holder']['pod']}"
    why = drawer(watch).get_by_role("button", name=f"Explain: {name}")
    why.click()
    expect(why).to_have_attribute("aria-expanded", "true")
    sentence = node.ask("GET", f"/allocations/{held['id']}/explanation")[1]["sentences"][1]
    expect(drawer(watch)).to_contain_text(sentence)
    # It stays open when the list changes.
    node.tell(f"run other/late-1 {SHARED} 1")
    page.wait_for_timeout(2500)
    expect(drawer(watch)).to_contain_text(sentence)
    node.tell("end other/late-1")
    why.click()
    expect(drawer(watch)).not_to_contain_text(sentence)


def pods_are_listed_each_with_a_drawer(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sign_in(watch, node, at="#view=pods")
    items = node.ask("GET", "/allocations?limit=500")[1]["items"]
    pods = {f"{a['holder']['namespace']}/{a['holder']['pod']}": a for a in items}
    until("a row for each pod", lambda: page.locator("#pods tbody tr").count() == len(pods), 30)
    name, held = next((n, a) for n, a in pods.items() if len(a["gpus"]) > 1)
    line = page.locator("#pods tbody tr", has_text=name)
    expect(line).to_contain_text(f"{len(held['devices'])} × {SHARED}")
    line.get_by_role("button", name=f"Explain: {name}").click()
    opened = page.get_by_role("complementary", name=f"Pod {name.split('/')[1]}")
    expect(opened).to_contain_text(f"namespace {name.split('/')[0]}")
    expect(opened).to_contain_text(held["id"])
    expect(opened).to_contain_text("Placed by timeslice")
    expect(opened).to_contain_text("Limit enforced bynothing")
    check("pod=" in address(watch), "the address does not name the pod")
    indices = sorted(g["index"] for g in node.gpus() if g["uuid"] in held["gpus"])
    opened.get_by_role("button", name=f"GPU {indices[0]}", exact=True).click()
    expect(page.get_by_role("complementary", name=f"GPU {indices[0]}", exact=True)).to_be_visible()
    page.go_back()
    expect(opened).to_be_visible()


def several_gpus_are_cordoned_at_once(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sign_in(watch, node)
    for index in (13, 14, 9):
        page.get_by_label(f"Select GPU {index}", exact=True).check()
    bulk = page.get_by_role("group", name="Selected GPUs")
    expect(bulk).to_contain_text("3 selected")
    bulk.get_by_role("button", name="Cordon…", exact=True).click()
    dialog = page.get_by_role("dialog", name="Cordon GPUs 13 and 14?")
    dialog.get_by_label("Reason").fill("rack work")
    dialog.get_by_role("button", name="Cordon", exact=True).click()
    expect(dialog).to_be_hidden()
    until("both cordoned", lambda: [node.drain_state(i) for i in (13, 14)] == ["cordoned"] * 2, 10)
    expect(row(watch, 14)).to_contain_text("rack work")
    check([node.gpus()[9]["drain"]["why"]] == ["fan replacement"], "a cordon of another was replaced")
    page.get_by_label("Select GPU 9", exact=True).uncheck()
    bulk.get_by_role("button", name="Uncordon…").click()
    page.get_by_role("dialog").get_by_role("button", name="Uncordon", exact=True).click()
    until("both open again", lambda: [node.drain_state(i) for i in (13, 14)] == ["active"] * 2, 10)
    bulk.get_by_role("button", name="Clear").click()
    expect(bulk).to_be_hidden()
    page.get_by_label("Select all that are shown").check()
    expect(bulk).to_contain_text("16 selected")


def a_selection_moves_no_row(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sign_in(watch, node)
    place = lambda: row(watch, 3).bounding_box()["y"]  # noqa: E731
    expect(row(watch, 3)).to_be_visible()
    page.wait_for_timeout(1000)
    before = place()
    page.get_by_label("Select GPU 3", exact=True).check()
    expect(page.get_by_role("group", name="Selected GPUs")).to_be_in_viewport()
    check(place() == before, f"the row moved from {before} to {place()}")


def keys_act_on_the_gpu_in_the_drawer(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sign_in(watch, node)
    row(watch, 3).get_by_role("button", name="GPU 3", exact=True).click()
    expect(page.get_by_role("complementary", name="GPU 3", exact=True)).to_be_visible()
    page.keyboard.press("j")
    expect(page.get_by_role("complementary", name="GPU 5", exact=True)).to_be_visible()
    page.keyboard.press("j")
    expect(page.get_by_role("complementary", name="GPU 7", exact=True)).to_be_visible()
    page.keyboard.press("k")
    expect(page.get_by_role("complementary", name="GPU 5", exact=True)).to_be_visible()
    # Not the selected ones, which are behind it.
    page.get_by_label("Select GPU 12", exact=True).check()
    page.keyboard.press("d")
    expect(page.get_by_role("dialog", name="Drain GPU 5?")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("c")
    dialog = page.get_by_role("dialog", name="Cordon GPU 5?")
    dialog.get_by_label("Reason").fill("by key")
    dialog.get_by_role("button", name="Cordon", exact=True).click()
    expect(drawer(watch).get_by_role("heading", name="GPU 5", exact=True)).to_be_focused()
    until("the cordon", lambda: node.drain_state(5) == "cordoned", 10)
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="GPU 5", exact=True)).to_be_focused()
    node.ask("DELETE", f"/gpus/{node.gpus()[5]['uuid']}/cordon")


def pods_are_stepped_through_by_keys(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sign_in(watch, node, at="#view=pods")
    rows = page.locator("#pods tbody tr")
    expect(rows.nth(1)).to_be_visible()
    page.keyboard.press("j")
    expect(rows.nth(0).get_by_role("button").first).to_be_focused()
    page.keyboard.press("j")
    expect(rows.nth(1).get_by_role("button").first).to_be_focused()
    page.keyboard.press("Enter")
    expect(drawer(watch).get_by_role("heading", level=2)).to_be_visible()
    second = rows.nth(1).get_by_role("button").first.get_attribute("aria-label")
    page.keyboard.press("k")
    first = rows.nth(0).get_by_role("button").first.get_attribute("aria-label")
    expect(page.get_by_role("complementary", name=f"Pod {first.split('/')[1]}", exact=True)).to_be_visible()
    check(first != second, "the two rows are of one pod")
    page.keyboard.press("Escape")
    expect(rows.nth(0).get_by_role("button").first).to_be_focused()


def memory_above_what_was_granted_is_marked(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sign_in(watch, node)
    expect(row(watch, 8)).to_be_visible()
    for gpu in node.gpus():
        used, granted = gpu.get("memoryUsedMiB", 0), gpu.get("memoryGrantedMiB", 0)
        over = row(watch, gpu["index"]).locator(".over")
        expect(over).to_have_count(1 if 0 < granted and granted + 600 < used else 0)
    # Its process is in no pod.
    row(watch, 8).get_by_role("button", name="GPU 8", exact=True).click()
    expect(drawer(watch)).to_contain_text("4200008")
    gpu = node.gpus()[8]
    uses = [use for a in node.ask("GET", f"/allocations?gpu={gpu['uuid']}")[1]["items"] for use in a["uses"] if use["part"] == gpu["uuid"]]
    known = [use["memoryUsedMiB"] for use in uses if "memoryUsedMiB" in use]
    if known:
        expect(drawer(watch)).to_contain_text(f"{(gpu['memoryUsedMiB'] - sum(known)) / 1024:.1f} GiB belong to no known pod")
    else:
        expect(drawer(watch)).not_to_contain_text("belong to no known pod")


def a_trial_names_the_gpu_that_vanished(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sign_in(watch, node, at="#view=policies")
    page.get_by_role("button", name="Change timeslice").click()
    dialog = page.get_by_role("dialog", name="Change timeslice")
    dialog.get_by_role("button", name="Try", exact=True).click()
    expect(dialog).to_contain_text("Devices of GPU 5 are not counted, since it is not found.")
    page.keyboard.press("Escape")


def links_of_gpus_that_are_away_are_grey(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sign_in(watch, node, at="#view=links")
    expect(page.locator("#links path.cell.away")).to_have_count(1)
    expect(page.get_by_role("list", name="Legend")).to_contain_text("not found or does not answer; links as last read")
    texts = page.locator("#links .word title").all_text_contents()
    away = [text for text in texts if "links as last read" in text]
    check(away and all(re.search(r"GPU (3|5|12)\b", text) for text in away), f"{away[:4]}")
    check(not any("GPU 0 to GPU 1:" in text for text in away), "GPUs that answer are grey")


def keys_do_what_the_help_says(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sign_in(watch, node)
    page.keyboard.press("j")
    expect(page.get_by_role("button", name="GPU 3", exact=True)).to_be_focused()
    page.keyboard.press("j")
    expect(page.get_by_role("button", name="GPU 5", exact=True)).to_be_focused()
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    expect(page.get_by_role("complementary", name="GPU 3")).to_be_visible()
    page.keyboard.press("d")
    expect(page.get_by_role("dialog", name="Drain GPU 3?")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    expect(drawer(watch)).to_be_hidden()
    page.keyboard.press("x")
    page.keyboard.press("j")
    page.keyboard.press("x")
    expect(page.get_by_role("group", name="Selected GPUs")).to_contain_text("2 selected")
    page.keyboard.press("c")
    expect(page.get_by_role("dialog", name="Cordon GPUs 3 and 5?")).to_be_visible()
    # Letters in a field are text.
    page.keyboard.type("dj?")
    expect(page.get_by_role("dialog").get_by_label("Reason")).to_have_value("dj?")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    expect(page.get_by_label("Search", exact=True)).to_be_focused()
    page.keyboard.type("reset")
    _shown(watch, [7])
    page.keyboard.press("Escape")
    until("the search is empty", lambda: page.get_by_label("Search", exact=True).input_value() == "", 5)
    page.get_by_role("button", name="GPU 7", exact=True).focus()
    page.keyboard.press("2")
    expect(page.get_by_role("heading", name="Pods", exact=True)).to_be_visible()
    page.keyboard.press("1")
    page.keyboard.press("?")
    help_of = page.get_by_role("dialog", name="Help")
    expect(help_of).to_contain_text("next and previous GPU")
    help_of.get_by_label("Turn keyboard shortcuts off").check()
    help_of.get_by_role("button", name="Close").click()
    page.keyboard.press("/")
    expect(page.get_by_label("Search", exact=True)).not_to_be_focused()
    check("keys=off" in address(watch), "the choice is not in the address")


def a_menu_is_used_by_keyboard(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    sign_in(watch, node)
    opened = menu(watch, 7)
    names = opened.get_by_role("menuitem").all_inner_texts()
    check(names == ["Details", "Cordon…", "Drain…", "Mark healthy…"], f"the menu has {names}")
    page.keyboard.press("End")
    expect(opened.get_by_role("menuitem", name="Mark healthy…")).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(opened.get_by_role("menuitem", name="Details")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Actions for GPU 7", exact=True)).to_be_focused()
    names = menu(watch, 9).get_by_role("menuitem").all_inner_texts()
    check(names == ["Details", "Drain…", "Uncordon…"], f"the menu of a cordoned GPU has {names}")
    page.mouse.click(5, 5)
    expect(page.get_by_role("menu")).to_have_count(0)
    forget = menu(watch, 5).get_by_role("menuitem", name="Forget…")
    expect(forget).to_contain_text("its allocations have not ended yet")
    expect(forget).to_have_attribute("aria-disabled", "true")


def a_phone_shows_the_status_line_and_a_line_for_each_gpu(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    page.set_viewport_size({"width": 420, "height": 900})
    sign_in(watch, node)
    expect(page.get_by_role("region", name="Status")).to_be_in_viewport()
    for index in node.bad:
        expect(row(watch, index)).to_be_in_viewport()
    check(_order(watch)[:4] == [3, 5, 7, 12], f"the order is {_order(watch)}")
    high = [row(watch, index).bounding_box()["height"] for index in (3, 0)]
    check(max(high) < 45, f"rows are {high} px high")
    for index, words in [(3, "fell off the bus"), (7, "needs a reset")]:
        reason = row(watch, index).locator(".reason")
        fits = reason.evaluate("(one) => one.scrollWidth <= one.clientWidth + 1")
        check(words in reason.inner_text() and fits, f"the reason of GPU {index} cannot be read")
    expect_no_horizontal_scroll(watch, "at 420")
    expect(page.get_by_role("list", name="Colours of namespaces")).to_be_visible()
    for name in ("GPUs", "Pods", "Timeline", "Policies", "Decisions", "Links"):
        box = page.get_by_role("navigation", name="Views").get_by_role("link", name=name).bounding_box()
        check(box["x"] + box["width"] <= 420, f"{name} lies outside of the bar of views: {box}")
    view(watch, "Pods")
    expect(page.locator("#pods tbody tr").first.get_by_role("button", name=re.compile("^Explain"))).to_be_visible()


OVERLAPS = """() => {
    // The boxes of lines of text, each as its ancestors let it be seen.
    const linesOf = (node) => {
        const range = document.createRange();
        range.selectNodeContents(node);
        return [...range.getClientRects()].map((line) => seen(node, line)).filter(Boolean);
    };
    const seen = (node, { left, right, top, bottom }) => {
        for (let one = node.parentElement; one; one = one.parentElement) {
            const style = getComputedStyle(one);
            if (style.visibility === 'hidden' || style.clipPath !== 'none') return null;
            if (style.overflow === 'visible') continue;
            const box = one.getBoundingClientRect();
            [left, right, top, bottom] = [Math.max(left, box.left), Math.min(right, box.right), Math.max(top, box.top), Math.min(bottom, box.bottom)];
        }
        return right - left > 1 && bottom - top > 1 ? { left, right, top, bottom, node, text: node.textContent.trim() } : null;
    };
    const found = [];
    const root = document.querySelector('#drawer:not([hidden])') ?? document.querySelector('#main');
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        if (node.textContent.trim() && !node.parentElement.closest('svg') && node.parentElement.checkVisibility()) found.push(...linesOf(node));
    }
    const both = [];
    found.forEach((a, i) => found.slice(i + 1).forEach((b) => {
        if (a.node !== b.node && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4) both.push(`${a.text} | ${b.text}`);
    }));
    return both;
}"""


def no_text_lies_on_another_on_a_phone(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    page.set_viewport_size({"width": 420, "height": 900})
    progress = {"evict": True, "atDeadline": "wait", "late": False, "secondsLeft": 3540, "allocations": ["a-1", "a-2"], "processes": 2, "holders": []}
    states = {
        0: {"bypasses": 12},
        1: {"drain": {"state": "draining", "by": "admin", "why": "a long reason", "marks": [], "progress": progress}},
        2: {"bypasses": 1, "health": {"state": "degraded", "reason": "12 rows wait for a reset", "since": "2026-01-01T00:00:00Z", "heals": True, "history": []}},
    }

    def changed(route: Route) -> None:
        data = route.fetch().json()
        data["items"] = [{**gpu, **states.get(gpu["index"], {})} for gpu in data["items"]]
        route.fulfill(status=200, content_type="application/json", body=json.dumps(data))

    def over(route: Route) -> None:
        data = route.fetch().json()
        for allocation in data["items"][:20]:
            for use in allocation["uses"]:
                use |= {"memoryUsedMiB": 13_000, "overLimit": True}
        route.fulfill(status=200, content_type="application/json", body=json.dumps(data))

    page.route("**/api/v1/gpus", changed)
    page.route("**/api/v1/allocations?*", over)
    sign_in(watch, node)
    expect(page.locator(".gpus tbody tr")).to_have_count(16)
    for name in ("Pods", "Timeline", "Policies", "Decisions", "Links", "GPUs"):
        view(watch, name)
        page.wait_for_timeout(1500)
        picture(page, f"phone-{name.lower()}")
        both = page.evaluate(OVERLAPS)
        check(not both, f"{name}: {both[:5]}")
    # A name touches the badge beside it before it lies on it.
    name, state = row(watch, 12).locator(".open").bounding_box(), row(watch, 12).locator(".state").bounding_box()
    check(state["x"] - name["x"] - name["width"] >= 4, f"{name} and {state}")
    page.get_by_role("button", name="Tiles").click()
    check(not (both := page.evaluate(OVERLAPS)), f"tiles: {both[:5]}")


def a_drawer_keeps_its_padding_beside_a_scrollbar(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    gpu = node.gpus()[12]["uuid"]
    sign_in(watch, node, at=f"#gpu={gpu}")
    expect(drawer(watch)).to_contain_text("Holders")
    for width in (420, 1440, 1900):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(300)
        bars = page.evaluate("[innerWidth - document.documentElement.clientWidth, drawer.offsetWidth - drawer.clientWidth]")
        check(bars[1] > 0, f"{width}: the drawer has no scrollbar: {bars}")
        for part in (".drawer-head", ".drawer-body"):
            left, right = drawer(watch).locator(part).evaluate("""(part) => {
                const [outer, style] = [part.getBoundingClientRect(), getComputedStyle(part)];
                return [outer.left + parseFloat(style.paddingLeft), drawer.getBoundingClientRect().left + drawer.clientLeft + drawer.clientWidth - outer.right + parseFloat(style.paddingRight)];
            }""")
            least = 12 if width == 420 else 0
            check(left >= least and right >= 12, f"{width}: {part} has {left} px left and {right} px right")
        wide = drawer(watch).evaluate("(one) => one.scrollWidth - one.clientWidth")
        check(wide <= 0, f"{width}: the drawer is scrolled sideways by {wide} px")
        both = page.evaluate(OVERLAPS)
        check(not both, f"{width}: {both[:5]}")


CASES = [
    no_text_lies_on_another_on_a_phone,
    a_drawer_keeps_its_padding_beside_a_scrollbar,
    the_status_line_says_what_is_wrong_and_filters,
    bad_gpus_are_first_and_sixteen_fit_on_one_screen,
    counters_filter_and_a_link_shows_the_same,
    capacity_adds_up_and_says_why,
    shares_have_colours_and_a_text,
    a_search_finds_what_is_meant,
    the_layout_can_be_tiles,
    a_gpu_has_a_drawer_with_an_address,
    a_pod_shows_why_it_got_its_gpu,
    pods_are_listed_each_with_a_drawer,
    several_gpus_are_cordoned_at_once,
    keys_do_what_the_help_says,
    keys_act_on_the_gpu_in_the_drawer,
    pods_are_stepped_through_by_keys,
    a_selection_moves_no_row,
    memory_above_what_was_granted_is_marked,
    a_trial_names_the_gpu_that_vanished,
    links_of_gpus_that_are_away_are_grey,
    a_menu_is_used_by_keyboard,
    a_phone_shows_the_status_line_and_a_line_for_each_gpu,
]
