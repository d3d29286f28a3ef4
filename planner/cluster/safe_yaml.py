"""Parsing YAML of users safely: aliases and merge keys are counted before values are built."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from quant.common.errors import SpecError

MOST_BYTES = 1 << 20
"""Largest file: a hundred bytes for each of ten thousand nodes, which take seconds to read."""

MOST_NODES = MOST_BYTES // 2
"""Most keys and values: no file of `MOST_BYTES` has more unless aliases multiply them."""

_IMPOSSIBLE = (ValueError, TypeError, AttributeError, LookupError, OverflowError)
"""Errors that the library raises for malformed numbers, dates and truth values."""


def parse_yaml(text: str, label: str) -> tuple[object, yaml.Node | None]:
    """Parse `text` to its values and its nodes with their lines. SpecError, which names `label`,
    for invalid YAML, for a document that is too large when written out, and for a repeated key.
    """
    if len(text) > MOST_BYTES:
        raise SpecError(f"{label} has {len(text)} characters; a cluster takes at most {MOST_BYTES}")
    try:
        document = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_more_nodes(document, label)
        _refuse_repeated_keys(document, label)
        return _values_of(document), document
    except (yaml.YAMLError, *_IMPOSSIBLE) as error:
        raise SpecError(f"{label} is not valid YAML: {error}") from error
    except RecursionError as error:
        raise SpecError(
            f"{label} nests too deeply or contains itself; write it out flat"
        ) from error


def _values_of(document: yaml.Node | None) -> object:
    """Build the values of nodes, without reading the text once more."""
    return None if document is None else yaml.SafeLoader("").construct_document(document)


def _refuse_more_nodes(document: yaml.Node | None, label: str) -> None:
    """Count keys and values with all aliases written out, visiting each node once."""
    if document is None:
        return
    sizes: dict[int, int] = {}
    waiting = [document]
    open_nodes: set[int] = set()
    while waiting:
        node = waiting[-1]
        missing = [child for child in _children(node) if id(child) not in sizes]
        if missing and id(node) not in open_nodes:
            open_nodes.add(id(node))
            waiting += missing
            continue
        waiting.pop()
        # A node that is still open here contains itself: its expansion ends there.
        sizes[id(node)] = 1 + sum(sizes.get(id(child), 1) for child in _children(node))
        if sizes[id(node)] > MOST_NODES:
            line = node.start_mark.line + 1
            raise SpecError(
                f"{label}:{line}: with its aliases and merge keys (<<) written out this has "
                f"{sizes[id(node)]:.3g} keys and values; {MOST_NODES} are the most. Write out "
                "what you mean, without aliases"
            )


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value


def _refuse_repeated_keys(document: yaml.Node | None, label: str) -> None:
    """Check every node once, however often aliases name it."""
    waiting, met = [] if document is None else [document], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in met:
            continue
        met.add(id(node))
        waiting += _children(node)
        if isinstance(node, yaml.MappingNode):
            _refuse_repeats_of(node, label)


def _refuse_repeats_of(node: yaml.MappingNode, label: str) -> None:
    seen: set[str] = set()
    for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
        if key.value in seen:
            raise SpecError(f"{label}:{key.start_mark.line + 1}: key {key.value!r} stands twice")
        seen.add(key.value)
