"""Pages taken apart: their elements, their text, the numbers in it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from llmpq.report.formatting import plain

VOID = {"meta", "br"}
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
UNITS = "s|ms|us|GiB|MiB|KiB|%|times|min|h|d|bit"


class Page(HTMLParser):
    """Elements with their attributes and text; fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        assert len(dict(attributes)) == len(attributes), name
        if name not in VOID:
            self._open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))

    def handle_endtag(self, name: str) -> None:
        assert self._open.pop() == name

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all_of(self, name: str, style: str = "") -> list[dict[str, str | None]]:
        return [
            attributes
            for each, attributes in self.elements
            if each == name and (not style or style in (attributes.get("class") or "").split())
        ]


def numbers(text: str) -> set[str]:
    """All numbers of a text, in the signs of a terminal."""
    return {found.lstrip("+-") for found in re.findall(NUMBER, plain(text))}


def measures(text: str) -> set[str]:
    """All numbers that have a unit behind them, with it."""
    found = re.findall(rf"({NUMBER}) ({UNITS})\b", plain(text).replace("%", "% "))
    return {f"{number.lstrip('+-')} {unit}" for number, unit in found}
