"""Swagger UI, by clicking: authorize, list, upload, drain."""

from __future__ import annotations

import json
import re
from pathlib import Path

from browser import Watch, picture
from node import Node
from playwright.sync_api import Locator
from say import check, until

PREBUILT = Path(__file__).resolve().parents[2] / "policies-wasm" / "prebuilt"


def _open(watch: Watch, node: Node) -> None:
    page = watch.page
    page.goto(f"{node.base}/swagger-ui/")
    page.locator(".opblock").first.wait_for()


def _authorize(watch: Watch, node: Node) -> None:
    page = watch.page
    page.locator(".auth-wrapper .btn.authorize").click()
    dialog = page.locator(".modal-ux")
    dialog.locator("input").first.fill(node.token)
    dialog.locator("button.authorize").first.click()
    dialog.get_by_text("Authorized", exact=True).wait_for()
    dialog.locator("button.btn-done").click()


def _operation(watch: Watch, method: str, path: str) -> Locator:
    """The block of an operation, opened."""
    blocks = watch.page.locator(f".opblock-{method}")
    exactly = watch.page.locator(f'[data-path="{path}"]')
    block = blocks.filter(has=exactly)
    block.locator(".opblock-summary").first.click()
    block.locator(".execute-wrapper, .btn.try-out__btn").first.wait_for()
    return block


def _execute(block: Locator) -> tuple[int, str]:
    block.locator("button.execute").click()
    live = block.locator(".live-responses-table")
    live.wait_for()
    status = live.locator("tbody .response-col_status").first.inner_text()
    return int(re.match(r"\d+", status.strip())[0]), live.inner_text()


def opens_and_authorizes_and_lists(watch: Watch, node: Node) -> None:
    _open(watch, node)
    watch.allow(401)
    listing = _operation(watch, "get", "/api/v1/gpus")
    status, _ = _execute(listing)
    check(status == 401, f"without the token GPUs were answered with {status}")
    _authorize(watch, node)
    status, text = _execute(listing)
    until("200 with the token", lambda: "200" in listing.locator(".live-responses-table").inner_text())
    uuid = node.gpus()[0]["uuid"]
    until("the UUID in the answer", lambda: uuid in listing.locator(".live-responses-table").inner_text())
    picture(watch.page, "swagger-gpus")
    stored = watch.page.evaluate("JSON.stringify([Object.entries(localStorage), document.cookie])")
    check(node.token not in stored, "the token was kept in the browser")


def uploads_a_policy(watch: Watch, node: Node) -> None:
    _open(watch, node)
    _authorize(watch, node)
    # Other bytes than the shipped ones are another version: a custom section without meaning at the end.
    module = node.folder / "binpack-of-the-test.wasm"
    module.write_bytes((PREBUILT / "binpack.wasm").read_bytes() + b"\x00\x05\x04test")
    upload = _operation(watch, "post", "/api/v1/policies")
    upload.locator("input[type=file]").set_input_files(module)
    status, text = _execute(upload)
    picture(watch.page, "swagger-upload")
    check(status == 201, f"the upload was answered with {status}: {text[:600]}")
    names = [(p["name"], p["shipped"]) for p in node.ask("GET", "/policies")[1]["items"]]
    check(("binpack", False) in names, f"the version is not among the policies: {names}")


def drains_a_gpu(watch: Watch, node: Node) -> None:
    _open(watch, node)
    _authorize(watch, node)
    gpu = node.gpus()[7]
    block = _operation(watch, "put", "/api/v1/gpus/{uuid}/drain")
    block.locator("tr[data-param-name=uuid] input").fill(gpu["uuid"])
    block.locator("textarea.body-param__text").fill(json.dumps({"reason": "by Swagger UI"}))
    status, text = _execute(block)
    picture(watch.page, "swagger-drain")
    check(status == 200, f"the drain was answered with {status}: {text[:600]}")
    check(node.drain_state(7) in ("draining", "drained"), "the GPU is not drained")
    node.ask("DELETE", f"/gpus/{gpu['uuid']}/cordon")


CASES = [opens_and_authorizes_and_lists, uploads_a_policy, drains_a_gpu]
