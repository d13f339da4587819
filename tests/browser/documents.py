"""The pictures of README.md and docs/, taken of what is there."""

from __future__ import annotations

import base64
from pathlib import Path

import browser
from browser import Watch, picture
from node import SixteenGpuNode
from page import drawer, expect_no_horizontal_scroll, open_action, row, sign_in
from playwright.sync_api import expect
from say import check

#: Where they go: the folder of screenshots, or docs/images with `just browser --images`.
IMAGES: Path | None = None
#: Most bytes of a picture in the repository.
BYTES_MAX = 150_000
WEBP = """async (png) => {
  const image = new Image();
  image.src = png;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height);
  canvas.getContext('2d').drawImage(image, 0, 0);
  const blob = await canvas.convertToBlob({ type: 'image/webp', quality: 0.9 });
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.readAsDataURL(blob);
  });
}"""


def _document(watch: Watch, name: str) -> None:
    """A picture of the documentation."""
    folder = IMAGES or browser.OUT
    folder.mkdir(parents=True, exist_ok=True)
    shot = base64.b64encode(watch.page.screenshot(animations="disabled")).decode()
    # The browser writes WebP, a third of the size of PNG.
    made = watch.page.evaluate(WEBP, f"data:image/png;base64,{shot}")
    data = base64.b64decode(made.split(",")[1])
    (folder / f"{name}.webp").write_bytes(data)
    check(data[8:12] == b"WEBP" and len(data) < BYTES_MAX, f"{name}.webp has {len(data)} bytes")


def pictures_for_the_documentation(watch: Watch, node: SixteenGpuNode) -> None:
    page = watch.page
    page.set_viewport_size({"width": 1440, "height": 840})
    sign_in(watch, node)
    expect(row(watch, 15)).to_be_visible()
    page.wait_for_timeout(1500)
    page.evaluate("document.activeElement.blur()")
    _document(watch, "page-gpus")
    page.set_viewport_size({"width": 1100, "height": 840})
    row(watch, 3).get_by_role("button", name="GPU 3", exact=True).click()
    expect(drawer(watch)).to_contain_text("Holders")
    page.wait_for_timeout(1000)
    _document(watch, "page-drawer")
    page.keyboard.press("Escape")
    open_action(watch, 3, "Drain…")
    _document(watch, "page-drain")


def pictures_at_two_widths_light_and_dark(watch: Watch, node: SixteenGpuNode) -> None:
    """For people to look at, in the folder of screenshots."""
    page = watch.page
    sign_in(watch, node)
    gpu = node.gpus()[12]["uuid"]
    held = node.ask("GET", f"/allocations?gpu={gpu}")[1]["items"][0]["holder"]
    views = {
        "gpus": "",
        "tiles": "#layout=tiles",
        "pods": "#view=pods",
        "timeline": "#view=timeline&last=24h",
        "policies": "#view=policies",
        "decisions": "#view=decisions",
        "links": "#view=links",
        "drawer-gpu": f"#gpu={gpu}",
        "drawer-pod": f"#pod={held['namespace']}/{held['pod']}",
    }
    for width, high in ((1440, 900), (420, 900)):
        page.set_viewport_size({"width": width, "height": high})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            for name, fragment in views.items():
                page.evaluate("(fragment) => { location.hash = fragment || '#'; }", fragment)
                page.wait_for_timeout(500)
                expect_no_horizontal_scroll(watch, f"{name} at {width}")
                picture(page, f"{name}-{width}-{scheme}")


CASES = [pictures_for_the_documentation, pictures_at_two_widths_light_and_dark]
