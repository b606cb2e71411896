"""A browser for the report's page: playwright's own, else a chromium or chrome on PATH; else the tests are skipped."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autopar.views.page import page
from tests.browser import sample

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        pytest.skip("no browser: playwright is not installed (pip install playwright)")
    with sync_playwright() as driver:
        own = Path(driver.chromium.executable_path)
        found = str(own) if own.exists() else next(filter(None, map(shutil.which, NAMES)), None)
        if found is None:
            pytest.skip(f"no browser: neither playwright's own nor one of {', '.join(NAMES)} on PATH")
        try:
            opened = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except Error as error:
            pytest.skip(f"no browser: {found} does not start ({str(error).splitlines()[0]})")
        yield opened
        opened.close()


@functools.cache
def sample_page() -> str:
    return page(sample.content())


class Tab:
    """A page in the browser, and what went wrong in it. `close` of the fixture asserts that nothing did."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: message.type in ("error", "warning") and self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def go(self, hash_: str) -> None:
        """Follow a link inside the page, as its own links do."""
        self.page.evaluate("hash => { location.hash = hash }", hash_)
        self.settle()

    def settle(self) -> None:
        """Until what was asked for is on the screen: two frames later."""
        self.page.evaluate(
            "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 0))))"
        )

    def arrive(self, hash_: str) -> None:
        """Wait until the page itself went to `hash_`.

        A condition in JavaScript would be compiled anew at each look, which the page's Content-Security-Policy forbids:
        it passes only where the first look already finds it true.
        """
        self.page.wait_for_url(lambda url: url.endswith(hash_))
        self.settle()

    @property
    def hash(self) -> str:
        return self.page.evaluate("location.hash")


@pytest.fixture
def open_report(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Tab]]:
    """Opens a report (`text`, else the sample) in a context with `options`. No tab may end with an error, or with a
    request for anything but its file.
    """
    tabs: list[tuple[Tab, str]] = []
    contexts = []

    def open_(text: str = "", hash_: str = "", **options: Any) -> Tab:
        file = tmp_path / f"report{len(tabs)}.html"
        file.write_text(text or sample_page(), encoding="utf-8")
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        context.route(
            "**/*", lambda route: route.continue_() if route.request.url.startswith(file.as_uri()) else route.abort()
        )
        tab = Tab(context.new_page())
        tabs.append((tab, file.as_uri()))
        tab.page.goto(file.as_uri() + hash_)
        tab.settle()
        return tab

    yield open_
    for context in contexts:
        context.close()
    for tab, uri in tabs:
        assert tab.problems == []
        # `data:,` is the empty icon: a browser asks for /favicon.ico without it.
        assert [url for url in tab.requests if not url.startswith((uri, "data:"))] == []
