"""A browser that opens files, at a width and in a colour scheme, and what it says of a page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

CONTRASTS = """() => {
  const channels = colour => (colour.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const solid = colour => { const c = channels(colour); return c.length >= 3 && c[3] !== 0; };
  const ground = element => {
    const picture = element.closest("svg");
    const own = picture && picture.querySelector(".ground");
    if (own) return getComputedStyle(own).fill;
    for (let e = element; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (solid(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const low = [];
  const walker = document.createTreeWalker(document.documentElement, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("style, title, head")) continue;
    if (!element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const colour = element.closest("svg") ? style.fill : style.color;
    const both = [colour, ground(element)].map(each => light(channels(each)));
    const [a, b] = both.sort((x, y) => y - x);
    const size = parseFloat(style.fontSize), bold = parseInt(style.fontWeight) >= 700;
    const least = size >= 24 || (bold && size >= 18.66) ? 3 : 4.5;
    const ratio = (a + 0.05) / (b + 0.05);
    const words = walker.currentNode.data.trim().slice(0, 40);
    if (ratio < least) low.push(`${ratio.toFixed(2)}: ${words}`);
  }
  return low;
}"""

FOCUSED = """() => {
  const element = document.activeElement, style = getComputedStyle(element);
  const stops = document.querySelectorAll("[data-stop]").length;
  if (!element.dataset.stop) element.dataset.stop = String(stops);
  return [element.tagName, element.dataset.stop,
    style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
}"""

WIDTHS = "() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]"


@contextmanager
def browser() -> Iterator[Any]:
    """A browser of playwright's, or the one that is installed; skips where there is none."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install '.[browser]'"
    )
    own = os.environ.get("LLMPQ_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    with playwright.sync_playwright() as started:
        try:
            opened = started.chromium.launch(
                executable_path=own, args=["--no-sandbox", "--disable-gpu"]
            )
        except playwright.Error as error:
            pytest.skip(f"needs Chromium (LLMPQ_BROWSER names one): {str(error).splitlines()[0]}")
        with opened:
            yield opened


@contextmanager
def page_of(
    opened: Any, at: Path | str, width: int, scheme: str, scripts: bool = True
) -> Iterator[Any]:
    """The page of a file or an address in a window of that width, whose clock stands still."""
    context = opened.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=scripts
    )
    try:
        page = context.new_page()
        if isinstance(at, str) and scripts:
            page.clock.install()
        page.goto(at if isinstance(at, str) else at.as_uri())
        yield page
    finally:
        context.close()
