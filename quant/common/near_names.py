"""Finding the known names that are nearest to one that is not known, for messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher

_MOST = 3

# One name must be as near as `t4` is to `t5`; the next ones may share less.
_NEAR, _NOT_FAR = 0.5, 0.3
_SHARE_OF_PATTERN = 0.15


def near_names(wanted: str, names: Mapping[str, str]) -> tuple[str, ...]:
    """The values of `names` whose keys are nearest to `wanted`, up to three, nearest first; none
    where no key is near.
    """
    best: dict[str, float] = {}
    for key, name in names.items():
        best[name] = max(best.get(name, 0.0), _likeness(wanted, key))
    if max(best.values(), default=0.0) < _NEAR:
        return ()
    near = (name for name, likeness in best.items() if likeness >= _NOT_FAR)
    return tuple(sorted(near, key=lambda name: -best[name])[:_MOST])


def _likeness(one: str, other: str) -> float:
    """The share of letters and digits in common, and for a part of it of their pattern: wrong
    digits are more likely than others.
    """
    patterns = [re.sub(r"\d", "0", text) for text in (one, other)]
    same, alike = (SequenceMatcher(None, *pair).ratio() for pair in ((one, other), patterns))
    return (1 - _SHARE_OF_PATTERN) * same + _SHARE_OF_PATTERN * alike
