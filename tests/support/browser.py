"""Headless browser for tests of the dashboard and the report, with the checks of axe-core."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.support.dashboard import LIMIT_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LIMIT_MS = LIMIT_S * 1_000
PAUSE_MS = 40
#: The rules of axe-core for the levels A and AA of WCAG.
WCAG_AA = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa")


@contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """Open a page. Script errors and violations of the content security policy fail the test."""
    context = browser.new_context(**options)
    context.set_default_timeout(LIMIT_MS)
    context.add_init_script(
        "window.violations=[];addEventListener('securitypolicyviolation',e=>window.violations.push(e.violatedDirective))"
    )
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    try:
        page.goto(url)
        yield page
        assert errors == []
        assert page.evaluate("window.violations") == []
    finally:
        context.close()


def ready(page: Page) -> None:
    page.wait_for_selector("html[data-ready] #link[data-state=live]")


def wait(page: Page, expression: str) -> None:
    """Poll from outside, because the page's policy forbids the script that playwright would inject."""
    deadline = time.monotonic() + LIMIT_S
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"timed out: {expression}; {page.inner_text('body')[:2_000]}"
        page.wait_for_timeout(PAUSE_MS)


def accessibility_violations(page: Page) -> dict[str, list[str]]:
    """Return the elements that violate a rule of WCAG AA, by rule, according to axe-core."""
    # The package has no types. It is imported only if there is a browser.
    from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]  # noqa: PLC0415

    options = {"runOnly": {"type": "tag", "values": WCAG_AA}, "resultTypes": ["violations"]}
    found = Axe().run(page, options=options).response["violations"]
    return {rule["id"]: [node["html"][:200] for node in rule["nodes"]] for rule in found}
