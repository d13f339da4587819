"""Whether the page can be used without seeing it: axe-core, and what it cannot judge."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from browser import Watch
from node import Node
from page import sign_in
from playwright.sync_api import expect
from say import TestError, check


def _axe(watch: Watch, when: str) -> None:
    found = Axe().run(watch.page).response["violations"]
    if found:
        words = "; ".join(f"{v['id']} ({v['help']}): {[n['target'] for n in v['nodes'][:4]]}" for v in found)
        raise TestError(f"{when}: {words}")


def axe_finds_nothing(watch: Watch, node: Node) -> None:
    page = watch.page
    page.goto(f"{node.base}/")
    _axe(watch, "signing in")
    sign_in(watch, node)
    gpu = node.gpus()[4]["uuid"]
    node.ask("PUT", f"/gpus/{gpu}/cordon", {"reason": "seen by axe"})
    expect(page.locator("#tiles")).to_contain_text("seen by axe", timeout=15_000)
    for details in page.locator("details summary").all():
        details.click()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        _axe(watch, scheme)
    page.get_by_role("button", name="Activate a policy…").click()
    page.get_by_role("dialog").wait_for()
    _axe(watch, "the dialog")
    page.keyboard.press("Escape")
    page.set_viewport_size({"width": 360, "height": 740})
    _axe(watch, "a phone")
    node.ask("DELETE", f"/gpus/{gpu}/cordon")


def landmarks_headings_and_names_are_there(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node)
    for role in ("banner", "main", "contentinfo"):
        check(page.get_by_role(role).count() == 1, f"no {role}")
    for name in ("Node", "GPUs", "Active stack", "Last decisions", "Links between GPUs"):
        expect(page.get_by_role("heading", level=2, name=name, exact=True)).to_be_visible()
        expect(page.get_by_role("region", name=name, exact=True)).to_be_visible()
    expect(page.get_by_role("heading", level=3, name="GPU 0", exact=True)).to_be_visible()
    expect(page.get_by_role("table", name="Resources")).to_be_visible()
    expect(page.get_by_role("table", name="Policies, in the order of their calls")).to_be_visible()
    check(page.locator("table:not(:has(caption))").count() == 0, "a table has no caption")
    picture = page.get_by_role("img", name="Links between 8 GPUs", exact=False)
    expect(picture).to_be_visible()
    check(page.locator("[aria-live=polite]").count() >= 1, "changes are not said")
    # Colour is never the only sign: each badge has a text, and a shape that screen readers skip.
    for badge in page.locator(".badge").all():
        check(len(badge.inner_text().strip()) > 2, "a badge without a word")
    # In a phone's layout rows are blocks, and are rows all the same.
    page.set_viewport_size({"width": 360, "height": 740})
    table = page.get_by_role("table", name="Policies, in the order of their calls")
    check(table.get_by_role("row").count() == 2 and table.get_by_role("cell").count() >= 5, "a table is none on a phone")


CASES = [axe_finds_nothing, landmarks_headings_and_names_are_there]
