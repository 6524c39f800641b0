"""The picture of the README: its texts stay in their boxes, whatever font the reader's browser has."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.support.dashboard import chromium, requires_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = requires_browser

PICTURE = Path(__file__).parents[2] / "docs" / "overview.svg"
MARGIN = 4
#: Styles of fonts that are wider and narrower than that of the author.
FONTS = {
    "as written": "",
    "serif": "font-family: serif",
    "monospace": "font-family: monospace",
    "wide": "font-family: serif; font-weight: 900; letter-spacing: .4em",
    "narrow": "letter-spacing: -.1em",
}
#: Boxes of all texts and rectangles, in the order of the file.
BOXES = """(all) => all.map((e) => {
  const { x, y, width, height } = e.getBBox();
  return [e.textContent, x, y, x + width, y + height];
})"""


class Box(NamedTuple):
    text: str
    left: float
    top: float
    right: float
    bottom: float

    def holds(self, other: Box, *, margin: float = 0) -> bool:
        return (
            self.left + margin <= other.left
            and other.right <= self.right - margin
            and self.top <= other.top
            and other.bottom <= self.bottom
        )

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.mark.parametrize("style", FONTS.values(), ids=FONTS)
def test_texts_fit_their_boxes_in_any_font(browser: Browser, style: str) -> None:
    page: Any = browser.new_page()
    page.set_content(PICTURE.read_text(encoding="utf-8"))
    page.add_style_tag(content=f"text {{ {style} }}")
    texts = [Box(*found) for found in page.eval_on_selector_all("text", BOXES)]
    boxes = [Box(*found) for found in page.eval_on_selector_all("rect", BOXES)]
    assert len(texts) > 10
    for text in texts:
        # Texts are centred, so the middle tells the boxes that shall hold it.
        middle = Box("", *[(text.left + text.right) / 2, (text.top + text.bottom) / 2] * 2)
        for box in boxes:
            if box.holds(middle):
                assert box.holds(text, margin=MARGIN), text
            else:
                assert not box.overlaps(text), text
    assert [pair for pair in combinations(texts, 2) if pair[0].overlaps(pair[1])] == []
    page.close()
