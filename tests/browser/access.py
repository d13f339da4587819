"""Whether the page can be used without seeing it: axe-core, and what it cannot judge."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from browser import Watch
from node import Node
from page import drawer, menu, open_action, sign_in, view
from playwright.sync_api import Locator, expect
from say import TestError, check


def _axe(watch: Watch, when: str) -> None:
    found = Axe().run(watch.page).response["violations"]
    if found:
        words = "; ".join(f"{v['id']} ({v['help']}): {[n['target'] for n in v['nodes'][:4]]}" for v in found)
        raise TestError(f"{when}: {words}")


def open_all(part: Locator) -> None:
    """Opens what is behind a summary."""
    closed = part.locator("details:not([open]) > summary:visible")
    while closed.count() > 0:
        closed.first.click()


def axe_finds_nothing(watch: Watch, node: Node) -> None:
    page = watch.page
    page.goto(f"{node.base}/")
    _axe(watch, "signing in")
    sign_in(watch, node)
    gpu = node.gpus()[4]["uuid"]
    node.ask("PUT", f"/gpus/{gpu}/cordon", {"reason": "seen by axe"})
    expect(page.locator("#gpus")).to_contain_text("seen by axe", timeout=15_000)
    for size in ((1280, 900), (360, 740)):
        page.set_viewport_size({"width": size[0], "height": size[1]})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            for name in ("Pods", "Timeline", "Policies", "Decisions", "Links", "GPUs"):
                view(watch, name)
                page.wait_for_timeout(300)
                open_all(page.locator("#main"))
                _axe(watch, f"{name}, {scheme}, {size[0]} px")
    page.set_viewport_size({"width": 1280, "height": 900})
    node.ask("DELETE", f"/gpus/{gpu}/cordon")


def axe_finds_nothing_in_drawers_menus_and_sheets(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node)
    held = node.ask("GET", "/allocations?state=live&pod=train-0")[1]["items"][0]["gpus"][0]
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.evaluate("(uuid) => { location.hash = `#gpu=${uuid}`; }", held)
        expect(drawer(watch)).to_contain_text("team-a/train-0")
        page.wait_for_timeout(500)
        open_all(drawer(watch))
        why = drawer(watch).get_by_role("button", name="Explain: team-a/train-0")
        if why.get_attribute("aria-expanded") == "false":
            why.click()
        expect(drawer(watch).locator(".why-here")).to_contain_text("team-a/train-0")
        _axe(watch, f"the drawer of a GPU, {scheme}")
        drawer(watch).get_by_role("button", name="Pod team-a/train-0").click()
        expect(drawer(watch)).to_contain_text("namespace team-a")
        page.wait_for_timeout(500)
        _axe(watch, f"the drawer of a pod, {scheme}")
        drawer(watch).get_by_role("button", name="Close").click()
        menu(watch, 2)
        _axe(watch, f"the menu, {scheme}")
        page.keyboard.press("Escape")
        open_action(watch, 2, "Drain…")
        _axe(watch, f"the drain sheet, {scheme}")
        page.keyboard.press("Escape")
        page.keyboard.press("?")
        expect(page.get_by_role("dialog", name="Help")).to_be_visible()
        _axe(watch, f"the help, {scheme}")
        page.keyboard.press("Escape")
        view(watch, "Policies")
        page.get_by_role("button", name="Activate a policy…").click()
        page.get_by_role("dialog").get_by_role("button", name="Try", exact=True).click()
        expect(page.get_by_role("dialog")).to_contain_text("It works on this node")
        _axe(watch, f"the policy sheet, {scheme}")
        page.keyboard.press("Escape")
        view(watch, "GPUs")
        page.get_by_role("button", name="Tiles").click()
        page.locator(".tile").first.wait_for()
        _axe(watch, f"tiles, {scheme}")
        page.get_by_role("button", name="Table").click()


def landmarks_headings_and_names_are_there(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node)
    for role in ("banner", "main", "contentinfo"):
        check(page.get_by_role(role).count() == 1, f"no {role}")
    expect(page.get_by_role("search")).to_be_visible()
    expect(page.get_by_role("navigation", name="Views")).to_be_visible()
    for link, name in [("GPUs", "GPUs"), ("Pods", "Pods"), ("Timeline", "Timeline"), ("Policies", "Active stack"),
                       ("Decisions", "Last decisions"), ("Links", "Links between GPUs")]:
        view(watch, link)
        expect(page.get_by_role("heading", level=2, name=name, exact=True)).to_be_visible()
        expect(page.get_by_role("region", name=name, exact=True)).to_be_visible()
        page.wait_for_timeout(300)
        check(page.locator("table:not(:has(caption))").count() == 0, "a table has no caption")
    picture = page.get_by_role("img", name="Links between 8 GPUs", exact=False)
    expect(picture).to_be_visible()
    view(watch, "GPUs")
    expect(page.get_by_role("table", name="Resources")).to_be_visible()
    expect(page.get_by_role("table", name="GPUs, those that need attention first")).to_be_visible()
    expect(page.get_by_role("row", name="GPU 0", exact=True)).to_be_visible()
    view(watch, "Policies")
    expect(page.get_by_role("table", name="Policies, in the order of their calls")).to_be_visible()
    check(page.locator("[aria-live=polite]").count() >= 1, "changes are not said")
    # Colour is never the only sign: each badge has a text, and a shape that screen readers skip.
    for badge in page.locator(".badge:visible:not(.status-line .badge)").all():
        check(len(badge.inner_text().strip()) > 2, "a badge without a word")
    # In a phone's layout rows are blocks, and are rows all the same.
    page.set_viewport_size({"width": 360, "height": 740})
    table = page.get_by_role("table", name="Policies, in the order of their calls")
    check(table.get_by_role("row").count() == 2 and table.get_by_role("cell").count() >= 5, "a table is none on a phone")


CASES = [axe_finds_nothing, axe_finds_nothing_in_drawers_menus_and_sheets, landmarks_headings_and_names_are_there]
