"""HTML and SVG that is safe by construction: text is escaped, only `Html` is taken as it is."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

_VOID = frozenset({"meta", "br", "line", "rect", "circle", "polyline"})


@dataclass(frozen=True)
class Html:
    """Markup that is ready to be written."""

    text: str


Content = Html | str


def tag(name: str, /, *children: Content, **attributes: str | float | None) -> Html:
    """An element; an attribute's trailing underscore is dropped, others become dashes.

    Attributes of None are left out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = join(children).text
    if name in _VOID and not inside:
        return Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{inside}</{name}>")


def join(parts: Iterable[Content]) -> Html:
    """One after the other, text escaped."""
    return Html("".join(p.text if isinstance(p, Html) else html.escape(p) for p in parts))


def table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[Content]],
    words: Collection[int] = (0,),
) -> Html:
    """A table whose rows become blocks where the page is narrow, each value after its heading.

    The columns `words` hold text, the others numbers, which are aligned to the right.
    """
    sides = ["words" if column in words else "number" for column in range(len(heads))]
    head = (
        tag("th", name, scope="col", role="columnheader", class_=side)
        for name, side in zip(heads, sides, strict=True)
    )
    body = (tag("tr", *_cells(row, heads, sides), role="row") for row in rows)
    whole = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *head, role="row"), role="rowgroup"),
        tag("tbody", *body, role="rowgroup"),
        role="table",
    )
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=caption)


def _cells(row: Sequence[Content], heads: Sequence[str], sides: Sequence[str]) -> list[Html]:
    """Roles are spelled out because rows that are shown as blocks would lose them."""
    return [
        tag("td", tag("span", content), role="cell", class_=side, data_head=name)
        for content, name, side in zip(row, heads, sides, strict=True)
    ]


def section(identifier: str, title: str, *children: Content) -> Html:
    """A part of the page under a heading that links can point to."""
    heading = tag("h2", title, id=f"{identifier}-title")
    return tag("section", heading, *children, id=identifier, aria_labelledby=f"{identifier}-title")


def folded(summary: str, *children: Content) -> Html:
    """What is shown on demand, and in print."""
    return tag("details", tag("summary", summary), *children)


def legend(entries: Iterable[tuple[str, str]]) -> Html:
    """Pairs of a style class, which gives the colour, and what it stands for."""
    items = (
        tag("li", tag("span", class_=f"swatch {style}", aria_hidden="true"), name)
        for style, name in entries
    )
    return tag("ul", *items, class_="legend")
