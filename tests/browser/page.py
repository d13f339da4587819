"""The page `/`: the node at a glance, as an operator uses it."""

from __future__ import annotations

import json

from browser import Watch, picture
from node import SHARED, VIEWER, Node
from playwright.sync_api import Locator, expect
from say import TestError, check, until


def sign_in(watch: Watch, node: Node, token: str | None = None, at: str = "") -> None:
    """`at` is the fragment of the address: what is shown."""
    page = watch.page
    page.goto(f"{node.base}/{at}")
    page.get_by_label("Token", exact=True).fill(token or node.token)
    page.get_by_role("button", name="Sign in").click()
    page.locator("#views a").first.wait_for()


def address(watch: Watch) -> str:
    """The address as it is now: `page.url` is as of the last event that was handled here."""
    return watch.page.evaluate("location.href")


def row(watch: Watch, index: int) -> Locator:
    return watch.page.get_by_role("row", name=f"GPU {index}", exact=True)


def menu(watch: Watch, index: int) -> Locator:
    """The menu of a GPU, opened."""
    watch.page.get_by_role("button", name=f"Actions for GPU {index}", exact=True).click()
    opened = watch.page.get_by_role("menu", name=f"Actions for GPU {index}", exact=True)
    opened.wait_for()
    return opened


def open_action(watch: Watch, index: int, name: str) -> Locator:
    """An action of a GPU, and the dialog that it opens."""
    menu(watch, index).get_by_role("menuitem", name=name, exact=True).click()
    dialog = watch.page.get_by_role("dialog")
    dialog.wait_for()
    return dialog


def expect_action(watch: Watch, index: int, name: str, timeout: float = 20_000) -> None:
    """The menu of a GPU has this action, once the page has seen its state."""
    state = {"Cordon…": "open", "Uncordon…": "cordoned"}[name]
    expect(row(watch, index)).to_have_attribute("data-drain", state, timeout=timeout)
    expect(menu(watch, index).get_by_role("menuitem", name=name, exact=True)).to_be_visible()
    watch.page.keyboard.press("Escape")


def view(watch: Watch, name: str) -> None:
    watch.page.get_by_role("navigation", name="Views").get_by_role("link", name=name).click()


def drawer(watch: Watch) -> Locator:
    return watch.page.locator("#drawer")


def expect_no_horizontal_scroll(watch: Watch, when: str) -> None:
    wide, window = watch.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    check(wide <= window, f"{when}: {wide} px wide in a window of {window}")


def the_shell_is_empty_and_a_wrong_token_is_explained(watch: Watch, node: Node) -> None:
    page = watch.page
    page.goto(f"{node.base}/")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    check("/var/lib/berth/token" in page.inner_text("body"), "the page does not say where the token lies")
    check("GPU-" not in page.content() and "browser-node" not in page.content(), "the shell has data in it")
    expect(page.get_by_label("Token", exact=True)).to_be_focused()
    picture(page, "page-sign-in")
    watch.allow(401)
    page.keyboard.type("x" * 64)
    page.keyboard.press("Enter")
    said = page.get_by_role("alert")
    expect(said).to_contain_text("What to do")
    picture(page, "page-sign-in-refused")
    check(page.evaluate("sessionStorage.length") == 0, "a refused token was kept")


def signs_in_shows_the_node_and_forgets_it(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node)
    expect(page.locator(".gpus tbody tr")).to_have_count(8)
    expect(page.get_by_text("browser-node")).to_be_visible()
    view(watch, "Pods")
    expect(page.locator("#pods")).to_contain_text("team-a/train-0")
    text = page.inner_text("main")
    for words in ["team-b/notebook-0", "team-b/<img/src=x>", "team-c/web-0"]:
        check(words in text, f"{words} is not shown")
    view(watch, "Policies")
    expect(page.locator("#stack")).to_contain_text("mixed")
    view(watch, "GPUs")
    check(page.locator("main img").count() == 0, "a pod's name became an element")
    gpu = node.gpu_of("train-0")
    index = gpu["index"]
    expect(row(watch, index)).to_contain_text("/ 79.6 / 79.6")
    row(watch, index).get_by_role("button", name=f"GPU {index}", exact=True).click()
    expect(drawer(watch)).to_contain_text("NVIDIA H100")
    drawer(watch).locator("summary", has_text="device").click()
    expect(drawer(watch).get_by_role("table", name=f"Devices of GPU {index}")).to_contain_text("team-a/train-0/main")
    check(page.locator("#drawer img").count() == 0, "a pod's name became an element")
    drawer(watch).get_by_role("button", name="Close").click()
    where = page.evaluate("[Object.values(sessionStorage).join(), localStorage.length, document.cookie, location.href]")
    check(where[0] == node.token and where[1:3] == [0, ""], "the token is kept elsewhere than in this tab's session")
    check(node.token not in where[3] and node.token not in page.content(), "the token is in the URL or in the page")
    picture(page, "page-light", full=True)
    page.reload()
    expect(page.locator(".gpus tbody tr")).to_have_count(8)
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Token", exact=True)).to_be_focused()
    left = page.content()
    check("GPU-" not in left and "team-a" not in left and "browser-node" not in left, "data stayed after the sign-out")
    check(page.evaluate("sessionStorage.length") == 0, "the token stayed after the sign-out")


def _tab_to(watch: Watch, button: Locator) -> None:
    wanted = button.element_handle()
    for _ in range(200):
        watch.page.keyboard.press("Tab")
        if watch.page.evaluate("(b) => document.activeElement === b", wanted):
            outline = watch.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            check(outline != "none", "the focus cannot be seen")
            return
    raise TestError("the button cannot be reached by Tab")


def cordons_by_keyboard_alone(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node)
    actions = page.get_by_role("button", name="Actions for GPU 6", exact=True)
    _tab_to(watch, actions)
    page.keyboard.press("Enter")
    expect(page.get_by_role("menuitem", name="Details")).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("menuitem", name="Cordon…")).to_be_focused()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Cordon GPU 6?")
    expect(dialog.get_by_label("Reason")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(actions).to_be_focused()
    check(node.drain_state(6) == "active", "Escape cordoned the GPU")
    page.keyboard.press("Space")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.keyboard.type("fan <b>replacement</b>")
    picture(page, "page-cordon")
    # Enter in the field confirms nothing.
    page.keyboard.press("Enter")
    node.quiet(0.5)
    check(dialog.is_visible() and node.drain_state(6) == "active", "Enter in the field of the reason cordoned the GPU")
    page.keyboard.press("Control+Enter")
    expect(dialog).to_be_hidden()
    expect(row(watch, 6)).to_contain_text("cordoned fan <b>replacement</b>", use_inner_text=True)
    check(node.drain_state(6) == "cordoned", "the GPU is not cordoned")
    expect(page.locator("#announcement")).to_contain_text("GPU 6 is cordoned")
    check(row(watch, 6).locator("b").count() == 0, "a reason became an element")
    # Not on a button that begins another change.
    expect(page.get_by_role("button", name="GPU 6", exact=True)).to_be_focused()
    node.ask("DELETE", f"/gpus/{node.gpus()[6]['uuid']}/cordon")


def drains_and_stops_and_uncordons(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node)
    gpu = node.gpu_of("train-0")
    index = gpu["index"]
    dialog = open_action(watch, index, "Drain…")
    expect(dialog).to_contain_text("team-a/train-0")
    dialog.get_by_label("Reason").fill("new fan")
    dialog.get_by_label("Deadline in minutes").fill("30")
    dialog.get_by_label("At the deadline").select_option("giveUp")
    dialog.get_by_role("button", name="Drain", exact=True).click()
    # The sheet stays, and shows the progress.
    expect(dialog).to_contain_text("draining by admin: new fan", use_inner_text=True)
    expect(dialog).to_contain_text("1 allocation left")
    expect(dialog).to_contain_text("not evicted team-a/train-0: it must end by itself", use_inner_text=True)
    expect(dialog).to_contain_text("kubectl delete pod -n team-a train-0")
    order = node.ask("GET", f"/gpus/{gpu['uuid']}/drain")[1]["progress"]
    check((order["atDeadline"], order["evict"]) == ("giveUp", False), f"another order than asked for: {order}")
    picture(page, "page-draining")
    dialog.get_by_role("button", name="Close (the drain goes on)").click()
    expect(row(watch, index)).to_contain_text("1 allocation left")
    open_action(watch, index, "Stop drain…").get_by_role("button", name="Stop drain", exact=True).click()
    expect_action(watch, index, "Uncordon…")
    expect(menu(watch, index).get_by_role("menuitem", name="Stop drain…", exact=True)).to_have_count(0)
    page.keyboard.press("Escape")
    asked = open_action(watch, index, "Uncordon…")
    # What Enter does is seen, although the mouse opened the dialog.
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    check(outline == "solid", f"the focus in the dialog cannot be seen: {outline}")
    asked.get_by_role("button", name="Uncordon", exact=True).click()
    expect(page.get_by_role("button", name=f"GPU {index}", exact=True)).to_be_focused()
    expect_action(watch, index, "Cordon…")
    check(node.drain_state(index) == "active", "the GPU is not active")


def a_refused_drain_says_why(watch: Watch, node: Node) -> None:
    """The daemon's own words, should the sheet permit what the daemon refuses."""
    page = watch.page
    sign_in(watch, node)
    dialog = open_action(watch, 6, "Drain…")
    page.evaluate("document.getElementById('evict').disabled = false")
    dialog.get_by_label("Evict the pods").check()
    watch.allow(409)
    dialog.get_by_role("button", name="Drain", exact=True).click()
    refused = dialog.get_by_role("alert")
    expect(refused).to_contain_text("No API server is configured")
    expect(refused).to_contain_text("What to do: start the daemon with --kubeconfig")
    picture(page, "page-drain-refused")
    check(node.drain_state(6) == "active", "a refused drain did something")


def _stack(node: Node) -> dict:
    return node.ask("GET", "/stack")[1]


def activates_a_policy_and_shows_refusals(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node, at="#view=policies")
    before = _stack(node)
    shipped = next(p for p in node.ask("GET", "/policies")[1]["items"] if p["name"] == "binpack" and p["shipped"])
    activate = page.get_by_role("button", name="Activate a policy…")
    activate.click()
    dialog = page.get_by_role("dialog", name="Activate a policy")
    dialog.get_by_label("Policy and version").select_option(shipped["digest"])
    expect(dialog).to_contain_text("The stack will be: binpack, mixed")
    dialog.get_by_role("button", name="Try", exact=True).click()
    expect(dialog).to_contain_text("It works on this node")
    dialog.get_by_role("button", name="Activate", exact=True).click()
    check(dialog.is_visible() and _stack(node)["revision"] == before["revision"], "activated without a reason")
    dialog.get_by_label("Reason").fill("pack the shares")
    picture(page, "page-activate")
    dialog.get_by_role("button", name="Activate", exact=True).click()
    expect(dialog).to_be_hidden()
    expect(page.locator("#stack")).to_contain_text("pack the shares")
    after = _stack(node)
    check([e["policy"] for e in after["entries"]] == ["binpack", "mixed"], f"another stack: {after}")
    check(after["entries"][1]["parameters"] == {"replicas": 4}, "the other entry lost its parameters")
    expect(activate).to_be_focused()

    # Parameters that the policy does not take.
    page.get_by_role("button", name="Change mixed").click()
    dialog = page.get_by_role("dialog", name="Change mixed")
    expect(dialog.get_by_label("replicas", exact=True)).to_have_value("4")
    dialog.get_by_role("button", name="Edit as JSON").click()
    check(json.loads(dialog.get_by_label("Parameters (JSON)").input_value()) == {"replicas": 4}, "the entry's parameters are not there")
    attempt = dialog.get_by_role("button", name="Try", exact=True)
    dialog.get_by_label("Parameters (JSON)").fill("{")
    dialog.get_by_label("Reason").fill("wrong")
    attempt.click()
    expect(dialog.get_by_role("alert")).to_contain_text("not a JSON object")
    dialog.get_by_label("Parameters (JSON)").fill('{"replicas": "four"}')
    watch.allow(412, 422)
    attempt.click()
    expect(dialog).to_contain_text("expected a whole number")
    picture(page, "page-activate-refused")

    # Another client changes the stack first.
    dialog.get_by_label("Parameters (JSON)").fill('{"replicas": 2}')
    attempt.click()
    expect(dialog).to_contain_text("It works on this node")
    entries = [{k: e[k] for k in ("policy", "digest", "parameters", "permissions", "onFault")} for e in before["entries"]]
    status, _ = node.ask("PUT", "/stack", {"entries": entries, "reason": "from elsewhere"})
    check(status == 200, "the other activation failed")
    dialog.get_by_role("button", name="Activate", exact=True).click()
    refused = dialog.get_by_role("alert")
    expect(refused).to_contain_text("Changed meanwhile")
    expect(refused).to_contain_text("What to do")
    page.keyboard.press("Escape")
    expect(page.locator("#stack")).to_contain_text("from elsewhere")


def changes_from_outside_are_seen(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node)
    # With a stream it takes a second, on a busy machine some more; without one, until the next poll.
    within = 20_000
    word = "live" if node.with_events() else "every 3 s"
    expect(page.locator("#pulse")).to_contain_text(word)
    uuid = node.gpus()[5]["uuid"]
    uuid_row = f"tr[data-gpu='{uuid}']"
    page.locator(uuid_row).evaluate("(found) => { found.dataset.mark = 'kept'; }")
    node.ask("PUT", f"/gpus/{uuid}/cordon", {"reason": "from outside"})
    expect(row(watch, 5)).to_contain_text("from outside", timeout=within)
    expect(page.locator("#announcement")).to_contain_text("GPU 5 is cordoned: from outside")
    node.ask("DELETE", f"/gpus/{uuid}/cordon")
    expect_action(watch, 5, "Cordon…", within)
    check(page.locator(f"{uuid_row}[data-mark=kept]").count() == 1, "a row was replaced")
    node.tell(f"run team-d/late-0 {SHARED} 1")
    view(watch, "Pods")
    expect(page.locator("#pods")).to_contain_text("team-d/late-0", timeout=30_000)
    view(watch, "Decisions")
    expect(page.locator("#decisions")).to_contain_text("team-d/late-0/main", timeout=30_000)


def a_daemon_that_is_away_is_said_and_comes_back(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node)
    watch.lost = True
    page.route("**/api/v1/**", lambda route: route.abort())
    view(watch, "Policies")
    expect(page.locator("#notices")).to_contain_text("No answer from the daemon")
    picture(page, "page-away")
    page.unroute("**/api/v1/**")
    expect(page.locator("#notices")).not_to_contain_text("No answer", timeout=25_000)


def a_token_that_reads_is_told_why_it_changes_nothing(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node, VIEWER)
    expect(page.locator("#who")).to_have_text("token viewer: read only")
    expect(page.locator("#notices")).to_contain_text("This token can read everything and change nothing")
    for name in ("Cordon…", "Drain…"):
        item = menu(watch, 6).get_by_role("menuitem", name=name)
        expect(item).to_have_attribute("aria-disabled", "true")
        expect(item).to_contain_text("this token may only read")
        item.click(force=True)
        expect(page.locator("#announcement")).to_contain_text("this token may only read")
        expect(page.get_by_role("dialog")).to_be_hidden()
        page.keyboard.press("Escape")
    picture(page, "page-viewer")
    view(watch, "Policies")
    for name in ("Activate a policy…", "Change mixed"):
        expect(page.get_by_role("button", name=name)).to_have_attribute("aria-disabled", "true")
        page.get_by_role("button", name=name).click(force=True)
        expect(page.get_by_role("dialog")).to_be_hidden()
    view(watch, "GPUs")
    row(watch, 6).get_by_role("button", name="GPU 6", exact=True).focus()
    page.keyboard.press("c")
    expect(page.get_by_role("dialog")).to_be_hidden()
    check(node.drain_state(6) == "active", "a token that reads cordoned a GPU")
    expect(page.locator("#pulse")).to_contain_text("live")


def a_right_that_was_taken_away_is_explained(watch: Watch, node: Node) -> None:
    """A token whose right changed after the page asked for it: the daemon refuses, and says why."""
    page = watch.page
    full = {"caller": "token viewer", "right": "change"}
    page.route("**/api/v1/access", lambda route: route.fulfill(status=200, content_type="application/json", body=json.dumps(full)))
    sign_in(watch, node, VIEWER)
    watch.allow(403)
    for name, confirm in [("Cordon…", "Cordon"), ("Drain…", "Drain")]:
        dialog = open_action(watch, 6, name)
        dialog.get_by_role("button", name=confirm, exact=True).click()
        refused = dialog.get_by_role("alert")
        expect(refused).to_contain_text('"viewer" may not change anything here')
        expect(refused).to_contain_text("What to do: use a token")
        picture(page, f"page-viewer-{confirm.lower()}")
        dialog.get_by_role("button", name="Cancel").click()
        expect(dialog).to_be_hidden()
    check(node.drain_state(6) == "active", "a token that reads cordoned a GPU")


def nothing_is_undone_that_was_not_seen(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node)
    uuid = node.gpus()[6]["uuid"]
    with page.expect_response(f"**/gpus/{uuid}/drain"):
        dialog = open_action(watch, 6, "Cordon…")
    node.ask("PUT", f"/gpus/{uuid}/drain", {"reason": "of another client"})
    watch.allow(412)
    dialog.get_by_role("button", name="Cordon", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("Changed meanwhile")
    expect(dialog.get_by_role("alert")).to_contain_text("What to do: cancel, and check its present state")
    picture(page, "page-changed-meanwhile")
    check(node.drain_state(6) in ("draining", "drained"), "the other order was undone")
    dialog.get_by_role("button", name="Cancel").click()
    expect(row(watch, 6)).not_to_have_attribute("data-drain", "open")
    open_action(watch, 6, "Uncordon…").get_by_role("button", name="Uncordon", exact=True).click()
    expect_action(watch, 6, "Cordon…")
    check(node.drain_state(6) == "active", "the GPU is not active")


def a_menu_stays_open_while_its_row_would_move(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node)
    uuid = node.gpus()[6]["uuid"]
    opened = menu(watch, 6)
    node.ask("PUT", f"/gpus/{uuid}/cordon", {"reason": "moves the row"})
    expect(row(watch, 6)).to_contain_text("moves the row")
    expect(opened).to_be_visible()
    page.keyboard.press("Escape")
    expect(opened).to_be_hidden()
    # With the menu closed the row moves, and one click opens the menu again.
    node.ask("PUT", f"/gpus/{uuid}/cordon", {"reason": "and is there"})
    expect(page.locator(".gpus tbody tr").first).to_have_attribute("aria-label", "GPU 6")
    expect(menu(watch, 6).get_by_role("menuitem", name="Uncordon…")).to_be_visible()
    page.keyboard.press("Escape")
    node.ask("DELETE", f"/gpus/{uuid}/cordon")


def a_page_that_nobody_sees_holds_no_stream_and_misses_nothing(watch: Watch, node: Node) -> None:
    page = watch.page
    streams = []
    page.on("request", lambda request: request.url.endswith("/api/v1/events") and streams.append(request))
    sign_in(watch, node)
    expect(page.locator("#pulse")).to_contain_text("live")
    node.ask("PUT", f"/gpus/{node.gpus()[4]['uuid']}/cordon", {"reason": "before"})
    expect(row(watch, 4)).to_contain_text("before")
    turn = """(hidden) => {
        Object.defineProperty(document, 'hidden', { configurable: true, get: () => hidden });
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    with page.expect_event("requestfailed", lambda request: request == streams[0]):
        page.evaluate(turn, True)
    node.ask("DELETE", f"/gpus/{node.gpus()[4]['uuid']}/cordon")
    node.quiet(2.5)
    check(len(streams) == 1, "a hidden page has a stream")
    expect(row(watch, 4)).to_contain_text("before")
    page.evaluate(turn, False)
    expect_action(watch, 4, "Cordon…", 5000)
    until("the stream again", lambda: page.evaluate("1") and len(streams) == 2, 5)
    check("last-event-id" in streams[1].headers, "it starts again instead of continuing")
    expect(page.locator("#pulse")).to_contain_text("live")


def a_token_that_opens_no_more_leaves_nothing_behind(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node)
    page.get_by_label("Search", exact=True).fill("H100")
    expect(page.locator("#found")).to_contain_text("match")
    row(watch, 6).get_by_role("button", name="GPU 6", exact=True).click()
    expect(drawer(watch)).to_contain_text("NVIDIA H100")
    drawer(watch).get_by_role("button", name="Drain…").click()
    dialog = page.get_by_role("dialog")
    dialog.wait_for()
    watch.allow(401)
    problem = {"type": "/problems/unauthorized", "title": "A valid token is needed", "status": 401, "detail": "wrong token"}
    refuse = lambda route: route.fulfill(status=401, content_type="application/problem+json", body=json.dumps(problem))  # noqa: E731
    page.route("**/api/v1/**", refuse)
    node.ask("PUT", f"/gpus/{node.gpus()[3]['uuid']}/cordon", {"reason": "so that the page reloads"})
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    expect(dialog).to_be_hidden()
    for left in ("announcement", "found", "gpus", "notices", "status-line", "capacity", "drawer", "who"):
        check(page.locator(f"#{left}").inner_text() == "", f"{left} is left")
    check(page.locator("#find").input_value() == "", "what was looked for is left")
    check("GPU-" not in page.content(), "data stayed")
    check("H100" not in address(watch) and "GPU-" not in address(watch), "what was shown is left in the address")
    expect(page.get_by_role("alert")).to_contain_text("Your token is no longer accepted")
    expect(page.get_by_role("alert")).to_contain_text("berth token rotate")
    page.unroute("**/api/v1/**")
    node.ask("DELETE", f"/gpus/{node.gpus()[3]['uuid']}/cordon")


def dark_light_and_less_motion(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    until("another ground in the dark", lambda: page.evaluate(ground) != light, 5)
    picture(page, "page-dark", full=True)
    # Bars do not move: on a busy node that would take more of the processor than everything else.
    row(watch, 0).get_by_role("button", name="GPU 0", exact=True).click()
    expect(drawer(watch)).to_be_visible()
    moves = "getComputedStyle(document.getElementById('drawer')).animationName"
    check(page.evaluate(moves) == "slide", "the drawer does not move at all")
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    check(page.evaluate(moves) == "none", "the drawer moves although less motion is asked for")


def a_phone_needs_no_sideways_scrolling(watch: Watch, node: Node) -> None:
    page = watch.page
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(f"{node.base}/")
    expect_no_horizontal_scroll(watch, "signing in")
    sign_in(watch, node)
    for details in page.locator("#view-gpus details summary").all():
        details.click()
    expect_no_horizontal_scroll(watch, "with everything open")
    picture(page, "page-phone", full=True)
    for name in ("Pods", "Timeline", "Policies", "Decisions", "Links"):
        view(watch, name)
        page.locator(f"#view-{name.lower()}").wait_for()
        page.wait_for_timeout(300)
        expect_no_horizontal_scroll(watch, name)
    view(watch, "GPUs")
    row(watch, 0).get_by_role("button", name="GPU 0", exact=True).click()
    expect(drawer(watch)).to_contain_text("NVIDIA H100")
    expect_no_horizontal_scroll(watch, "with the drawer")
    check(page.locator("#main").evaluate("(main) => main.inert"), "what the drawer covers can be reached")
    drawer(watch).get_by_role("button", name="Close").click()
    view(watch, "Policies")
    page.get_by_role("button", name="Activate a policy…").click()
    page.get_by_role("dialog").wait_for()
    expect_no_horizontal_scroll(watch, "with the dialog")
    picture(page, "page-phone-dialog")


CASES = [
    the_shell_is_empty_and_a_wrong_token_is_explained,
    signs_in_shows_the_node_and_forgets_it,
    cordons_by_keyboard_alone,
    drains_and_stops_and_uncordons,
    a_refused_drain_says_why,
    activates_a_policy_and_shows_refusals,
    changes_from_outside_are_seen,
    a_daemon_that_is_away_is_said_and_comes_back,
    a_token_that_reads_is_told_why_it_changes_nothing,
    a_right_that_was_taken_away_is_explained,
    nothing_is_undone_that_was_not_seen,
    a_menu_stays_open_while_its_row_would_move,
    a_page_that_nobody_sees_holds_no_stream_and_misses_nothing,
    a_token_that_opens_no_more_leaves_nothing_behind,
    dark_light_and_less_motion,
    a_phone_needs_no_sideways_scrolling,
]
