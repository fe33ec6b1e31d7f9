"""A headless browser to look at pages with, driven by playwright."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
# No display, no sandbox (which root can't have), and nothing that a browser does of its own accord.
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def _unavailable(reason: str) -> NoReturn:
    if os.environ.get("DISKBUF_BROWSER") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


@contextlib.contextmanager
def open_browser() -> Iterator["Browser"]:
    """Starts this machine's browser; without one the test is skipped, or fails where DISKBUF_BROWSER is "required"."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        _unavailable(f"no browser on PATH; looked for {', '.join(NAMES)}")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        _unavailable("playwright isn't installed; it is in the extra test")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(SWITCHES))
        try:
            yield browser
        finally:
            browser.close()
