"""Debian's Chromium, driven by Playwright: one for a module, with a clean context for each test."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, Response, Route, sync_playwright

from tests.support.debian import install

_OPTIONS = (
    "--no-sandbox",  # it refuses to run as root with one
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_MS = 30_000.0


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_program(), args=[*_OPTIONS])
        yield browser
        browser.close()


def _program() -> str:
    if shutil.which("chromium") is None:
        install("chromium")
    found = shutil.which("chromium")
    assert found is not None
    return found


class Visit:
    """One person with one tab: what it loaded, and everything it ought not to have done."""

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        self.url = url
        self.loaded: list[Response] = []
        self.elsewhere: list[str] = []
        self.errors: list[str] = []
        self._context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **context})
        self._context.set_default_timeout(PATIENCE_MS)
        self._context.route(lambda address: not address.startswith(url), self._refuse)
        self.page: Page = self._context.new_page()
        self.page.on("response", lambda response: self.loaded.append(response))
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def close(self) -> None:
        self._context.close()

    def go(self, view: str) -> None:
        self.page.goto(f"{self.url}/#/{view}")

    def has_signed_in(self, key: str) -> None:
        """As if it had been here before."""
        self._context.add_init_script(f"sessionStorage.setItem('tinsmith.key', {key!r})")

    def sign_in(self, key: str) -> None:
        self.page.goto(self.url)
        self.page.get_by_label("API key").fill(key)
        self.page.get_by_role("button", name="Sign in").click()

    def set_offline(self, is_offline: bool) -> None:
        self._context.set_offline(is_offline)

    def forgive(self, text: str) -> None:
        """What a browser writes by itself when the server refuses something is no fault of the page."""
        self.errors = [error for error in self.errors if text not in error]

    def _refuse(self, route: Route) -> None:
        self.elsewhere.append(route.request.url)
        route.abort()

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)
