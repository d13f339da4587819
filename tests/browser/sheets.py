"""The drain sheet, the policy sheet, and the way back to an earlier stack."""

from __future__ import annotations

import json
import re

from browser import Watch, picture
from node import SHARED, Node
from page import drawer, expect_action, open_action, row, sign_in, view
from playwright.sync_api import Locator, Page, Route, expect
from say import check, until


def _change_mixed(page: Page) -> Locator:
    """The sheet that changes the parameters of the active policy."""
    page.get_by_role("button", name="Change mixed").click()
    expect(page.get_by_role("dialog", name="Change mixed")).to_be_visible()
    return page.get_by_role("dialog")


def _with_api_server(watch: Watch) -> None:
    """As if the daemon had an API server: the daemon of this test has none."""

    def answer(route: Route) -> None:
        real = route.fetch()
        route.fulfill(status=200, content_type="application/json", body=json.dumps({**real.json(), "apiServer": {"done": True}}))

    watch.page.route("**/api/v1/node", answer)


def _runs(node: Node, pod: str) -> str:
    """The indices of the GPUs that a pod holds, as the page writes them: `0-1`."""
    held = {gpu for a in node.ask("GET", f"/allocations?state=live&pod={pod}")[1]["items"] for gpu in a["gpus"]}
    first, *_, last = sorted(gpu["index"] for gpu in node.gpus() if gpu["uuid"] in held)
    return f"{first}-{last}" if last - first == len(held) - 1 else f"{first}, {last}"


def a_drain_sheet_says_who_leaves_and_what_cannot_work(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node)
    index = node.gpu_of("train-0")["index"]
    dialog = open_action(watch, index, "Drain…")
    expect(dialog).to_contain_text("1 pod on it")
    expect(dialog).to_contain_text("It holds 2 devices on 2 GPUs in all")
    expect(dialog).to_contain_text(f"team-a/train-0 2 × nvidia.com/gpu on GPUs {_runs(node, 'train-0')} ○ not evicted the drain waits until it ends", use_inner_text=True)
    evict = dialog.get_by_label("Evict the pods")
    expect(evict).to_be_disabled()
    expect(dialog).to_contain_text("Not possible: No API server is configured: start the daemon with --kubeconfig FILE")
    choices = dialog.get_by_label("At the deadline").locator("option")
    expect(choices.nth(1)).to_be_disabled()
    expect(choices.nth(2)).to_be_disabled()
    expect(choices.nth(1)).to_have_text("stop the drain; the GPU stays cordoned (not possible: there is no deadline)")
    dialog.get_by_label("Deadline in minutes").fill("5")
    expect(choices.nth(1)).to_be_enabled()
    expect(choices.nth(2)).to_have_text("delete the remaining pods, whatever their disruption budgets say (not possible: pods are not evicted)")
    picture(page, "sheet-drain")
    dialog.get_by_role("button", name="Cancel").click()
    check(node.drain_state(index) == "active", "the dialog was cancelled, and the GPU is not active")


def with_an_api_server_pods_can_be_evicted(watch: Watch, node: Node) -> None:
    page = watch.page
    _with_api_server(watch)
    watch.allow(409)
    sign_in(watch, node)
    index = node.gpu_of("train-0")["index"]
    dialog = open_action(watch, index, "Drain…")
    dialog.get_by_label("Evict the pods").check()
    expect(dialog).to_contain_text(f"team-a/train-0 2 × nvidia.com/gpu on GPUs {_runs(node, 'train-0')} ◆ evicted when the drain starts", use_inner_text=True)
    # The daemon of this test has no API server to ask.
    expect(dialog).to_contain_text("Owners and disruption budgets are not known: pods are evicted through the API server")
    dialog.get_by_label("Deadline in minutes").fill("10")
    dialog.get_by_label("At the deadline").select_option("delete")
    # Without evict it cannot stay chosen.
    dialog.get_by_label("Evict the pods").uncheck()
    expect(dialog.get_by_label("At the deadline")).to_have_value("wait")
    dialog.get_by_label("Evict the pods").check()
    dialog.get_by_label("At the deadline").select_option("delete")
    dialog.get_by_label("Reason").fill("firmware")
    sent = []
    page.route("**/drain", lambda route: (sent.append(route.request), route.abort())[1] if route.request.method == "PUT" else route.fallback())
    watch.lost = True
    dialog.get_by_role("button", name="Drain", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("No answer from the daemon")
    order = json.loads(sent[0].post_data)
    check(order == {"reason": "firmware", "evict": True, "deadlineSeconds": 600, "atDeadline": "delete"}, f"the order is {order}")
    check("if-match" in sent[0].headers, "the order has no condition")


def a_drain_shows_who_blocks_it_and_can_be_stopped(watch: Watch, node: Node) -> None:
    """What blocks an eviction comes from an API server: these holders are made up here."""
    page = watch.page
    uuid = node.gpus()[6]["uuid"]
    blocked = [
        {"namespace": "web", "pod": "front-1", "containers": ["main"], "allocations": ["a-1"], "state": "terminating"},
        {"namespace": "kube-system", "pod": "dcgm", "containers": ["main"], "allocations": ["a-2"], "state": "staticPod"},
        {"namespace": "web", "pod": "front-2", "containers": ["main"], "allocations": ["a-3"], "state": "disruptionBudget", "message": "needs 3 healthy pods", "comesBack": True},
    ]

    def answer(route: Route) -> None:
        real = route.fetch()
        data = real.json()
        for gpu in data["items"]:
            if gpu["uuid"] == uuid and gpu["drain"]["state"] in ("draining", "drained"):
                progress = {"evict": True, "atDeadline": "wait", "late": False, "secondsLeft": 540, "allocations": ["a-1", "a-2", "a-3"], "processes": 2, "holders": blocked}
                gpu["drain"] = {**gpu["drain"], "state": "draining", "progress": progress}
        route.fulfill(status=200, content_type="application/json", body=json.dumps(data))

    page.route("**/api/v1/gpus", answer)
    sign_in(watch, node)
    dialog = open_action(watch, 6, "Drain…")
    dialog.get_by_label("Reason").fill("new fan")
    dialog.get_by_role("button", name="Drain", exact=True).click()
    expect(dialog).to_contain_text(re.compile(r"3 allocations left, 2 processes, (9m|8m \d+s) until its deadline, its pods are evicted"))
    left = dialog.get_by_role("list", name="Remaining holders").get_by_role("listitem").all_inner_texts()
    check("kube-system/dcgm" in left[0] and "blocks" in left[0] and "manifests" in left[0], f"the first is {left[0]!r}")
    check("web/front-2" in left[1] and "needs 3 healthy pods" in left[1] and "its DaemonSet creates it again" in left[1], f"the second is {left[1]!r}")
    check("web/front-1" in left[2] and "terminating" in left[2], f"the third is {left[2]!r}")
    picture(page, "sheet-progress")
    expect(page.get_by_role("region", name="Status")).to_contain_text("GPU 6 cannot finish its drain: a static pod blocks it")
    dialog.get_by_role("button", name="Stop drain…").click()
    asked = page.get_by_role("dialog", name="Stop the drain of GPU 6?")
    asked.get_by_role("button", name="Stop drain", exact=True).click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect_action(watch, 6, "Uncordon…")
    check(node.drain_state(6) == "cordoned", "the drain was not stopped")
    node.ask("DELETE", f"/gpus/{uuid}/cordon")


def a_button_of_the_drawer_acts_on_the_gpu_as_it_is_now(watch: Watch, node: Node) -> None:
    page = watch.page
    uuid = node.gpus()[6]["uuid"]
    node.ask("PUT", f"/gpus/{uuid}/cordon", {"reason": "first reason"})
    sign_in(watch, node, at=f"#view=pods&gpu={uuid}")
    expect(drawer(watch)).to_contain_text("first reason")
    node.ask("PUT", f"/gpus/{uuid}/cordon", {"reason": "second reason"})
    expect(drawer(watch)).to_contain_text("second reason")
    drawer(watch).get_by_role("button", name="Uncordon…").click()
    dialog = page.get_by_role("dialog", name="Uncordon GPU 6?")
    expect(dialog).to_contain_text("second reason")
    dialog.get_by_role("button", name="Uncordon", exact=True).click()
    expect(dialog).to_be_hidden()
    check(node.drain_state(6) == "active", "the GPU is not uncordoned")


def a_drain_lists_a_pod_that_came_after_its_button(watch: Watch, node: Node) -> None:
    page = watch.page
    gpus = node.gpus()
    idle = next(gpu["uuid"] for gpu in gpus if all(use["held"] == 0 for use in gpu["resources"]))
    others = [gpu["uuid"] for gpu in gpus if gpu["uuid"] != idle]
    try:
        # So that the pod gets this GPU.
        for uuid in others:
            node.ask("PUT", f"/gpus/{uuid}/cordon", {"reason": "not this one"})
        sign_in(watch, node, at=f"#gpu={idle}")
        expect(drawer(watch).get_by_role("button", name="Drain…")).to_be_visible()
        expect(drawer(watch)).to_contain_text("No pod holds a device of it.")
        node.tell(f"run team-d/after-0 {SHARED} 1")
        expect(drawer(watch)).to_contain_text("team-d/after-0", timeout=30_000)
        drawer(watch).get_by_role("button", name="Drain…").click()
        expect(page.get_by_role("dialog")).to_contain_text("team-d/after-0")
        page.keyboard.press("Escape")
        node.tell("end team-d/after-0")
        until("the end of the pod", lambda: node.ask("GET", "/allocations?state=live&pod=after-0")[1]["total"] == 0, 30)
    finally:
        for uuid in others:
            node.ask("DELETE", f"/gpus/{uuid}/cordon")


def what_no_field_can_show_is_edited_as_json(watch: Watch, node: Node) -> None:
    """No shipped policy has such parameters: the form is made here."""
    page = watch.page
    page.goto(f"{node.base}/")
    schema = {"properties": {
        "names": {"type": "array", "items": {"type": "string"}}, "count": {"type": "integer"},
        "either": {"type": ["string", "object"]}, "mode": {"enum": ["a", "b"]},
    }}
    make = """async ([schema, value]) => {
        const form = new (await import('/page/schema-form.js')).SchemaForm(schema, value);
        return [form.value(), !!form.root.querySelector('#parameters')];
    }"""
    for value, as_json in [
        ({"names": ["x", "y"], "count": 3, "mode": "b"}, False),
        ({"either": {"a": 1}}, False),
        ({"names": ["x,y"]}, True), ({"names": []}, True), ({"names": [" x"]}, True), ({"names": "x"}, True),
        ({"count": "3"}, True), ({"count": 2.5}, True), ({"count": None}, True), ({"mode": "c"}, True), ({"other": 1}, True),
    ]:
        kept, shown = page.evaluate(make, [schema, value])
        check(kept == value, f"{value} became {kept}")
        check(shown == as_json, f"{value}: {'fields' if as_json else 'JSON'}")


def a_policy_alone_keeps_its_permissions(watch: Watch, node: Node) -> None:
    page = watch.page
    status, _ = node.ask("PUT", "/stack", {"entries": [{"policy": "mixed", "parameters": {"replicas": 4}, "permissions": {"shareMax": 64}}], "reason": "at most 64 shares"})
    check(status == 200, "the activation failed")
    sign_in(watch, node, at="#view=policies")
    dialog = _change_mixed(page)
    dialog.get_by_label("replicas", exact=True).fill("2")
    dialog.get_by_label("Position in the stack").select_option("only")
    with page.expect_request("**/api/v1/trials") as tried:
        dialog.get_by_role("button", name="Try", exact=True).click()
    check(tried.value.post_data_json["entries"][0]["permissions"]["shareMax"] == 64, "the trial has other permissions")
    expect(dialog).to_contain_text("It works on this node")
    dialog.get_by_label("Reason").fill("alone")
    dialog.get_by_role("button", name="Activate", exact=True).click()
    expect(dialog).to_be_hidden()
    (entry,) = node.ask("GET", "/stack")[1]["entries"]
    check(entry["parameters"] == {"replicas": 2} and entry["permissions"]["shareMax"] == 64, f"the entry is {entry}")
    node.ask("DELETE", "/stack/override?reason=over")


def parameters_have_a_form_made_from_their_schema(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node, at="#view=policies")
    dialog = _change_mixed(page)
    replicas = dialog.get_by_label("replicas", exact=True)
    expect(replicas).to_have_attribute("type", "number")
    expect(replicas).to_have_value("4")
    expect(dialog).to_contain_text("Shares of a GPU. A share is an equal part of its memory and compute.")
    expect(dialog.get_by_label("advertise", exact=True).locator("option")).to_have_text(["default: both", "both", "latched"])
    expect(dialog.get_by_label("resource", exact=True)).to_have_attribute("placeholder", "default: nvidia.com/gpu")
    # The others are behind a summary: only this one has a value.
    expect(dialog.get_by_label("advertise", exact=True)).to_be_hidden()
    dialog.locator("summary", has_text="More").click()
    difference = dialog.locator(".difference")
    replicas.fill("5")
    expect(difference).to_contain_text('+ mixed {"replicas":5}')
    replicas.fill("200")
    expect(difference).to_have_count(0)
    dialog.get_by_role("button", name="Try", exact=True).click()
    refused = dialog.locator(".field", has=page.locator("#p-replicas")).get_by_role("alert")
    expect(refused).to_contain_text("replicas cannot be used")
    replicas.fill("8")
    expect(refused).to_have_text("")
    dialog.get_by_label("advertise", exact=True).select_option(label="latched")
    expect(dialog.locator(".difference")).to_contain_text('+ mixed {"advertise":"latched","replicas":8}')
    dialog.get_by_role("button", name="Edit as JSON").click()
    text = json.loads(dialog.get_by_label("Parameters (JSON)").input_value())
    check(text == {"advertise": "latched", "replicas": 8}, f"the JSON is {text}")
    dialog.get_by_label("Parameters (JSON)").fill('{"replicas": 2, "reserveWhole": 1}')
    dialog.get_by_role("button", name="Edit as a form").click()
    expect(replicas).to_have_value("2")
    expect(dialog.get_by_label("reserveWhole", exact=True)).to_have_value("1")
    # Another policy has another form; what is rare and takes JSON is behind a summary.
    timeslice = next(p for p in node.ask("GET", "/policies")[1]["items"] if p["name"] == "timeslice")
    dialog.get_by_label("Policy and version").select_option(timeslice["digest"])
    expect(page.get_by_role("dialog", name="Activate a policy")).to_be_visible()
    dialog.locator("summary", has_text="overrides").click()
    dialog.get_by_label("overrides", exact=True).fill('[{"index": 0, "replicas": 2}]')
    expect(dialog.locator(".difference")).to_contain_text('"overrides":[{"index":0,"replicas":2}]')
    page.keyboard.press("Escape")


def a_policy_is_tried_before_it_is_activated(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node, at="#view=policies")
    before = node.ask("GET", "/stack")[1]
    dialog = _change_mixed(page)
    activate = dialog.get_by_role("button", name="Activate", exact=True)
    expect(dialog.get_by_label("replicas", exact=True)).to_have_value("4")
    expect(activate).to_have_attribute("aria-disabled", "true")
    activate.click(force=True)
    expect(page.locator("#announcement")).to_contain_text("try it first")
    dialog.get_by_label("replicas", exact=True).fill("2")
    dialog.get_by_label("Devices to request").fill("2")
    dialog.get_by_role("button", name="Try", exact=True).click()
    expect(dialog).to_contain_text("It works on this node. 8 GPUs would be offered differently: 0, 1, 2, 3, 4, 5, 6 and 7.")
    shared = dialog.get_by_role("table", name="Devices now and after activation").locator("tr", has_text=SHARED)
    expect(shared.locator("del").first).to_have_text("32")
    expect(shared.locator("ins").first).to_have_text("16")
    expect(dialog).to_contain_text(f"A request for 2 × {SHARED} would be granted on")
    expect(dialog.locator(".difference")).to_contain_text('− mixed {"replicas":4}')
    expect(activate).to_have_attribute("aria-disabled", "false")
    # Changed since: it has to be tried again.
    dialog.get_by_label("replicas", exact=True).fill("3")
    expect(activate).to_have_attribute("aria-disabled", "true")
    check(node.ask("GET", "/stack")[1]["revision"] == before["revision"], "a trial changed the stack")
    picture(page, "sheet-policy")
    # Why is written beside the button.
    expect(dialog.locator(".why")).to_have_text("Activate is not possible yet: it was changed since it was tried: try it again.")
    # Enter in a field does not get around it.
    dialog.get_by_label("Reason").fill("untried")
    page.keyboard.press("Enter")
    check(node.ask("GET", "/stack")[1]["revision"] == before["revision"], "an untried stack was activated")
    page.keyboard.press("Escape")


def a_policy_that_leaves_nothing_free_is_shown_as_a_warning(watch: Watch, node: Node) -> None:
    """The answer is made up: no shipped policy takes all free devices of this node."""
    page = watch.page

    def answer(route: Route) -> None:
        real = route.fetch()
        data = real.json()
        data["resources"] = [{"resource": SHARED, "devices": 32, "free": 0, "devicesNow": 32, "freeNow": 24}]
        route.fulfill(status=200, content_type="application/json", body=json.dumps(data))

    page.route("**/api/v1/trials", answer)
    sign_in(watch, node, at="#view=policies")
    dialog = _change_mixed(page)
    dialog.get_by_role("button", name="Try", exact=True).click()
    expect(dialog.locator(".notice.warn")).to_contain_text(f"It works, but no device of {SHARED} would be free.")
    expect(dialog.locator(".notice.good")).to_have_count(0)
    page.keyboard.press("Escape")


def the_buttons_of_a_long_sheet_stay_in_view(watch: Watch, node: Node) -> None:
    page = watch.page
    page.set_viewport_size({"width": 1280, "height": 500})
    sign_in(watch, node, at="#view=policies")
    dialog = _change_mixed(page)
    expect(dialog.get_by_label("replicas", exact=True)).to_have_value("4")
    for name in ("Try", "Cancel", "Activate"):
        box = dialog.get_by_role("button", name=name, exact=True).bounding_box()
        check(box["y"] + box["height"] <= 500, f"{name} is below the fold: {box}")
    high = dialog.evaluate("(one) => one.scrollHeight - one.clientHeight")
    check(high > 0, "the sheet is not longer than the window")
    page.keyboard.press("Escape")


def an_earlier_stack_is_rolled_back_to_beside_the_history(watch: Watch, node: Node) -> None:
    page = watch.page
    sign_in(watch, node, at="#view=policies")
    before = node.ask("GET", "/stack")[1]
    dialog = _change_mixed(page)
    expect(dialog.get_by_label("replicas", exact=True)).to_have_value("4")
    dialog.get_by_label("replicas", exact=True).fill("6")
    dialog.get_by_role("button", name="Try", exact=True).click()
    expect(dialog).to_contain_text("It works on this node")
    dialog.get_by_label("Reason").fill("six for the weekend")
    dialog.get_by_role("button", name="Activate", exact=True).click()
    history = page.get_by_role("table", name="Active and earlier stacks, newest first")
    expect(history.locator("tbody tr").first).to_contain_text("six for the weekend")
    expect(history.locator("tbody tr").first).to_contain_text("active")
    page.get_by_role("button", name=f"Roll back to revision {before['revision']}", exact=True).click()
    asked = page.get_by_role("dialog", name=f"Roll back to revision {before['revision']}?")
    expect(asked.locator(".difference")).to_contain_text('− mixed {"replicas":6}')
    expect(asked.locator(".difference")).to_contain_text('+ mixed {"replicas":4}')
    picture(page, "sheet-rollback")
    asked.get_by_label("Reason").fill("too many")
    asked.get_by_role("button", name="Roll back", exact=True).click()
    expect(page.locator("#stack")).to_contain_text("too many")
    after = node.ask("GET", "/stack")[1]
    check([e["parameters"] for e in after["entries"]] == [e["parameters"] for e in before["entries"]], "another stack is active")


def the_stack_of_the_file_is_used_again(watch: Watch, node: Node) -> None:
    page = watch.page
    entries = [{"policy": "mixed", "parameters": {"replicas": 8}}]
    status, _ = node.ask("PUT", "/stack", {"entries": entries, "reason": "over the file"})
    check(status == 200, "the activation failed")
    sign_in(watch, node, at="#view=policies")
    expect(page.locator("#stack")).to_contain_text("The configuration file’s stack is overridden: mixed")
    page.get_by_role("button", name="Use the file’s stack again…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator(".difference")).to_contain_text('− mixed {"replicas":8}')
    dialog.get_by_label("Reason").fill("as in the file")
    dialog.get_by_role("button", name="Use the file’s stack", exact=True).click()
    expect(page.locator("#stack")).to_contain_text("from the configuration file")
    until("the file's stack", lambda: node.ask("GET", "/stack")[1]["source"] == "file", 10)



def _made_up_preview(watch: Watch, holders: dict[str, dict]) -> None:
    """Owners and budgets come from an API server: these are made up, by the name of the pod."""

    def answer(route: Route) -> None:
        real = route.fetch(url=route.request.url.replace("evict=true", "evict=false"))
        items = [{**holder, **holders.get(holder.get("pod", ""), {})} for holder in real.json()["holders"]]
        if "evict=false" in route.request.url:
            items = [{**holder, "state": "notAsked" if holder["state"] == "disruptionBudget" else holder["state"]} for holder in items]
        route.fulfill(status=200, content_type="application/json", body=json.dumps({"holders": items}))

    watch.page.route("**/drain/preview?*", answer)


def a_drain_sheet_begins_with_what_it_costs(watch: Watch, node: Node) -> None:
    page = watch.page
    _with_api_server(watch)
    budget = "The disruption budget train needs 2 healthy pods and has 2 currently"
    _made_up_preview(watch, {
        "train-0": {"shown": True, "owner": {"kind": "StatefulSet", "name": "train"}, "state": "disruptionBudget", "message": budget},
        "notebook-0": {"shown": True},
        "web-0": {"shown": True, "state": "staticPod"},
    })
    sign_in(watch, node)
    for gpu in node.gpus():
        page.get_by_label(f"Select GPU {gpu['index']}", exact=True).check()
    page.get_by_role("group", name="Selected GPUs").get_by_role("button", name="Drain…").click()
    dialog = page.get_by_role("dialog")
    dialog.wait_for()
    line = lambda pod: dialog.locator(".leaving > li", has_text=pod)  # noqa: E731
    # A pod is there once, with all that it holds.
    expect(line("team-a/train-0")).to_have_count(1)
    expect(line("team-a/train-0")).to_contain_text(f"2 × nvidia.com/gpu on GPUs {_runs(node, 'train-0')}")
    expect(line("team-a/train-0")).to_contain_text("of StatefulSet train")
    expect(line("team-a/train-0")).not_to_contain_text("needs 2 healthy pods")
    expect(line("team-b/notebook-0")).to_contain_text("without a controller: it is not created again")
    expect(line("team-b/<img/src=x>")).to_contain_text("owner not known")
    expect(line("team-c/web-0")).to_contain_text("stays a static pod cannot be evicted", use_inner_text=True)
    dialog.get_by_label("Evict the pods").check()
    expect(line("team-a/train-0")).to_contain_text(f"waits its disruption budget allows no eviction at present: {budget}", use_inner_text=True)
    expect(line("team-b/notebook-0")).to_contain_text("evicted when the drain starts", use_inner_text=True)
    expect(line("team-c/web-0")).to_contain_text("blocks a static pod cannot be evicted", use_inner_text=True)
    picture(page, "sheet-drain-cost")
    dialog.get_by_role("button", name="Cancel").click()


def _two_entries(node: Node) -> list[dict]:
    """Activates binpack before mixed; returns the entries."""
    entries = [{"policy": "binpack"}, {"policy": "mixed", "parameters": {"replicas": 4}, "onFault": "deny"}]
    status, answer = node.ask("PUT", "/stack", {"entries": entries, "reason": "two entries"})
    check(status == 200, f"the activation failed: {answer}")
    return answer["entries"]


def a_move_is_a_move_and_the_trial_is_of_what_is_activated(watch: Watch, node: Node) -> None:
    page = watch.page
    _two_entries(node)
    sign_in(watch, node, at="#view=policies")
    page.get_by_role("button", name="Change binpack").click()
    dialog = page.get_by_role("dialog", name="Change binpack")
    position = dialog.get_by_label("Position in the stack")
    expect(position.locator("option")).to_have_text(["first, before mixed (as it is)", "after mixed, last", "alone: all others are removed from the stack"])
    expect(dialog).to_contain_text("Policies and parameters stay as they are.")
    position.select_option(label="after mixed, last")
    expect(dialog).to_contain_text("The stack will be: mixed, binpack")
    expect(dialog.locator(".difference li", has_text="↕")).to_have_count(2)
    with page.expect_request("**/api/v1/trials") as tried:
        dialog.get_by_role("button", name="Try", exact=True).click()
    expect(dialog).to_contain_text("It works on this node")
    expect(dialog).to_contain_text("Called in this order: mixed@")
    picture(page, "sheet-move")
    dialog.get_by_label("Reason").fill("mixed first")
    with page.expect_request(lambda request: request.url.endswith("/api/v1/stack") and request.method == "PUT") as put:
        dialog.get_by_role("button", name="Activate", exact=True).click()
    expect(dialog).to_be_hidden()
    check(tried.value.post_data_json["entries"] == put.value.post_data_json["entries"], "another stack was tried than activated")
    after = node.ask("GET", "/stack")[1]["entries"]
    check([e["policy"] for e in after] == ["mixed", "binpack"], f"not a move: {[e['policy'] for e in after]}")
    check(after[0]["parameters"] == {"replicas": 4} and after[0]["onFault"] == "deny", f"the other entry changed: {after[0]}")
    node.ask("DELETE", "/stack/override?reason=over")


def an_entry_of_the_stack_is_removed(watch: Watch, node: Node) -> None:
    page = watch.page
    _two_entries(node)
    sign_in(watch, node, at="#view=policies")
    page.get_by_role("button", name="Remove mixed").click()
    dialog = page.get_by_role("dialog", name="Remove mixed from the stack?")
    expect(dialog.locator(".difference")).to_contain_text('− mixed {"replicas":4}')
    # What it does on this node is there before it is done.
    shared = dialog.get_by_role("table", name="Devices now and after activation").locator("tr", has_text=SHARED)
    expect(shared.locator("ins").first).to_have_text("0")
    remove = dialog.get_by_role("button", name="Remove", exact=True)
    expect(remove).to_have_attribute("aria-disabled", "false")
    remove.click()
    expect(dialog.locator(".wrong")).to_have_text("Needed: it is empty.")
    check(len(node.ask("GET", "/stack")[1]["entries"]) == 2, "it was removed without a reason")
    picture(page, "sheet-remove")
    dialog.get_by_label("Reason").fill("not needed")
    remove.click()
    expect(dialog).to_be_hidden()
    check([e["policy"] for e in node.ask("GET", "/stack")[1]["entries"]] == ["binpack"], "another stack is active")
    expect(page.locator("#stack")).to_contain_text("not needed")
    node.ask("DELETE", "/stack/override?reason=over")


def _is_on_top(page: Page, found: Locator) -> bool:
    """Whether nothing covers the middle of it."""
    return found.evaluate("""(one) => {
        const box = one.getBoundingClientRect();
        const top = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
        return box.height > 0 && !!top && one.contains(top);
    }""")


def a_change_that_is_not_possible_yet_says_why_where_it_is_seen(watch: Watch, node: Node) -> None:
    page = watch.page
    page.set_viewport_size({"width": 1280, "height": 560})
    sign_in(watch, node, at="#view=policies")
    dialog = _change_mixed(page)
    activate = dialog.get_by_role("button", name="Activate", exact=True)
    expect(dialog.locator(".why")).to_have_text("Activate is not possible yet: try it first, which changes nothing.")
    activate.click(force=True)
    announced = dialog.locator(".announcement")
    expect(announced).to_contain_text("try it first")
    check(_is_on_top(page, announced), "what is announced is behind the dialog")
    dialog.get_by_label("replicas", exact=True).fill("2")
    dialog.get_by_role("button", name="Try", exact=True).click()
    expect(activate).to_have_attribute("aria-disabled", "false")
    expect(dialog.locator("label", has_text="Reason")).to_have_text("Reason (required)")
    activate.click()
    missing = dialog.locator(".field", has=page.locator("#reason")).get_by_role("alert")
    expect(missing).to_have_text("Needed: it is empty.")
    check(_is_on_top(page, missing), "why nothing happens is not in view")
    expect(dialog.get_by_label("Reason")).to_be_focused()
    expect(dialog.get_by_label("Reason")).to_have_attribute("aria-invalid", "true")
    picture(page, "sheet-reason-missing")
    page.keyboard.press("Escape")
    # So is a number that a drain cannot have.
    view(watch, "GPUs")
    dialog = open_action(watch, 6, "Drain…")
    dialog.get_by_label("Deadline in minutes").fill("999999")
    dialog.get_by_role("button", name="Drain", exact=True).click()
    wrong = dialog.locator(".field", has=page.locator("#deadline")).get_by_role("alert")
    expect(wrong).to_contain_text("10080")
    check(_is_on_top(page, wrong) and node.drain_state(6) == "active", "a wrong deadline is not refused in view")
    page.keyboard.press("Escape")


CASES = [
    a_drain_sheet_begins_with_what_it_costs,
    a_move_is_a_move_and_the_trial_is_of_what_is_activated,
    an_entry_of_the_stack_is_removed,
    a_change_that_is_not_possible_yet_says_why_where_it_is_seen,
    a_drain_sheet_says_who_leaves_and_what_cannot_work,
    with_an_api_server_pods_can_be_evicted,
    a_drain_shows_who_blocks_it_and_can_be_stopped,
    a_button_of_the_drawer_acts_on_the_gpu_as_it_is_now,
    a_drain_lists_a_pod_that_came_after_its_button,
    what_no_field_can_show_is_edited_as_json,
    parameters_have_a_form_made_from_their_schema,
    a_policy_is_tried_before_it_is_activated,
    a_policy_that_leaves_nothing_free_is_shown_as_a_warning,
    the_buttons_of_a_long_sheet_stay_in_view,
    an_earlier_stack_is_rolled_back_to_beside_the_history,
    the_stack_of_the_file_is_used_again,
    a_policy_alone_keeps_its_permissions,
]
