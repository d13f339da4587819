"""Chromium, and what is held of every page that it opens: no request leaves the host, nothing is refused
by the content security policy, and nothing is wrong on the console."""

from __future__ import annotations

import re
import shutil
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, Playwright, Route
from say import TestError

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
MISSING = (
    "chromium is missing. Debian: apt-get install -y --no-install-recommends chromium; Ubuntu: the package of a"
    " Chrome, since its chromium is a snap; or name one with --chromium PATH"
)
VIOLATIONS = """
window.__violations = [];
document.addEventListener('securitypolicyviolation', (e) => window.__violations.push(`${e.violatedDirective}: ${e.blockedURI}`));
"""
_FAILED_LOAD = re.compile(r"Failed to load resource: the server responded with a status of (\d+)")


def find(given: str | None) -> str:
    for name in [given] if given else NAMES:
        if path := shutil.which(name):
            return path
    raise TestError(MISSING)


def launch(playwright: Playwright, program: str) -> Browser:
    # In a container Chromium's own sandbox has no user namespaces; the pages are ours.
    arguments = ["--no-sandbox", "--no-proxy-server", "--disable-background-networking", "--disable-component-update"]
    # With scrollbars, as users have them: they take room beside the content.
    return playwright.chromium.launch(executable_path=program, args=arguments, ignore_default_args=["--hide-scrollbars"])


class Watch:
    """What a page did."""

    def __init__(self, page: Page, base: str) -> None:
        self.page = page
        self.base = base
        self.requests: list[str] = []
        self.console: list[str] = []
        self.allowed: set[int] = set()
        #: Whether this case takes the connection away.
        self.lost = False
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: message.type in ("error", "warning") and self.console.append(message.text))
        page.on("pageerror", lambda error: self.console.append(f"uncaught: {error}"))

    def allow(self, *statuses: int) -> None:
        """Answers that this case provokes; the browser writes each to its console."""
        self.allowed.update(statuses)

    def verdict(self) -> None:
        away = [url for url in self.requests if not url.startswith((self.base + "/", "data:", "blob:"))]
        if away:
            raise TestError(f"requests left the host: {away[:5]}")
        violations = self.page.evaluate("window.__violations")
        if violations:
            raise TestError(f"the content security policy refused: {violations[:5]}")
        wrong = [text for text in self.console if not self._expected(text)]
        if wrong:
            raise TestError(f"on the console: {wrong[:5]}")
        if any("token" in url and "token=" in url for url in self.requests):
            raise TestError("a token was sent in a URL")

    def _expected(self, text: str) -> bool:
        if self.lost and "net::ERR_FAILED" in text:
            return True
        found = _FAILED_LOAD.match(text)
        return bool(found) and int(found[1]) in self.allowed


@contextmanager
def opened(browser: Browser, base: str, *, width=1280, height=900, scheme="light", motion="no-preference"):
    """A page in a context of its own; its verdict is given at the end."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion=motion, locale="en-GB"
    )
    context.add_init_script(VIOLATIONS)
    if PAGE:
        context.route(re.compile(rf"{re.escape(base)}/(page/[^/]+)?(#.*)?$"), _from_folder)
    page = context.new_page()
    page.set_default_timeout(20_000)
    watch = Watch(page, base)
    try:
        yield watch
        watch.verdict()
    except Exception:
        picture(page, "failed")
        raise
    finally:
        # A request whose answer is still being changed must not fail the next case.
        page.unroute_all(behavior="ignoreErrors")
        context.close()


OUT = Path("target/browser")
#: The folder whose files are shown in place of the program's, so that a change of the page needs no build.
PAGE: Path | None = None
KINDS = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


def _from_folder(route: Route) -> None:
    name = route.request.url.split("#")[0].rpartition("/")[2] or "index.html"
    # The program's own policy holds for these files, too.
    real = route.fetch(url=route.request.url.split("#")[0].partition("/page/")[0].rstrip("/") + "/")
    headers = {"content-security-policy": real.headers["content-security-policy"], "content-type": KINDS[(PAGE / name).suffix]}
    route.fulfill(status=200, headers=headers, body=(PAGE / name).read_bytes())


def picture(page: Page, name: str, *, full: bool = False) -> None:
    """A screenshot for people to look at."""
    OUT.mkdir(parents=True, exist_ok=True)
    try:
        page.screenshot(path=OUT / f"{name}.png", full_page=full, animations="disabled")
    except Exception as error:  # noqa: BLE001: a picture that cannot be taken must not hide why it was wanted
        print(f"      no picture {name}: {error}", flush=True)
