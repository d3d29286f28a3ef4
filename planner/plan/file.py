"""Reading and writing the files of plans and fleets: JSON with a digest of its own content."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import TypeAdapter, ValidationError

from quant.common.errors import SpecError, invalid_field
from quant.common.files import write_whole
from quant.common.json_text import loads
from quant.common.versions import other_version, unknown_fields, unknown_in

PLAN_VERSION = 1
DIGEST = "digest"
FLEET_KEY = "replicas"
"""The key that tells a file of a fleet from that of a plan."""

Kind = Literal["plan", "fleet"]
_OWN_KEY = {"plan": "stages", "fleet": FLEET_KEY}
_PLAN_AGAIN = "plan again with llmpq plan"
_COMMAND = {"plan": "llmpq plan -o plan.json", "fleet": "llmpq plan --replicas auto"}


def is_fleet(content: object) -> bool:
    return isinstance(content, Mapping) and FLEET_KEY in content


class Saved(ABC):
    """A plan or a fleet, a dataclass of pydantic's, which has a file."""

    FILE_KIND: ClassVar[Kind]

    @abstractmethod
    def check(self, source: str) -> None: ...

    def to_json(self) -> str:
        text = _adapter(type(self)).dump_json(self, indent=1).decode() + "\n"
        brace, version, rest = text.split("\n", 2)
        return f'{brace}\n{version}\n "{DIGEST}": "{_digest(text)}",\n{rest}'

    def save(self, path: str | Path) -> None:
        kind, target, text = self.FILE_KIND, Path(path), self.to_json()
        if not target.name:
            raise SpecError(f"cannot write the {kind} to {str(path)!r}: no file name; name a file")
        try:
            write_whole(target, text)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
            raise SpecError(f"cannot write the {kind} to {target}: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        return cls.from_json(read(path), str(path))

    @classmethod
    def from_json(cls, text: str, source: str = "") -> Self:
        source = source or cls.FILE_KIND
        spec: Self = _parsed(text, source, cls.FILE_KIND, _adapter(cls))
        spec.check(source)
        return spec


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot read plan {path}: {error}") from error


def _parsed(text: str, source: str, kind: Kind, adapter: TypeAdapter[Any]) -> Any:
    """Parse a plan or fleet; SpecError for one changed since it was written. One without a digest
    (older, or taken out to keep a change) is read: `planner.plan.check` sees what would crash.
    """
    try:
        content = loads(text)
        json.dumps(content, ensure_ascii=False).encode()  # no half of a surrogate pair
    except json.JSONDecodeError as error:
        raise SpecError(f"{source}:{error.lineno}: not JSON: {error.msg}") from error
    except ValueError as error:  # a number too long, or too deep a nesting
        raise SpecError(f"{source}: not a {kind}: {error}") from error
    if kind == "plan" and is_fleet(content):
        raise SpecError(
            f"{source}: a fleet of pipelines where one plan belongs; llmpq run and llmpq serve "
            "take fleets, for all else plan without --replicas"
        )
    if not isinstance(content, Mapping) or _OWN_KEY[kind] not in content:
        raise SpecError(f"{source}: not a {kind}; make one with {_COMMAND[kind]}")
    if content.get("version") != PLAN_VERSION:
        wrong = other_version(content.get("version"), PLAN_VERSION, _PLAN_AGAIN)
        raise SpecError(f"{source}: {kind} {wrong}")
    if DIGEST in content:
        if content[DIGEST] != _digest(text):
            raise SpecError(
                f"{source}: the {kind} was changed after it was written: its content is not that "
                f"of its digest {content[DIGEST]!s:.40}; plan again with llmpq plan, or, to keep "
                f'the change, remove the line "{DIGEST}"'
            )
        text = json.dumps({key: value for key, value in content.items() if key != DIGEST})
    try:
        return adapter.validate_json(text, strict=True)
    except ValidationError as error:
        unknown = unknown_in(error)
        if unknown:
            said = unknown_fields(unknown, _PLAN_AGAIN)
            raise SpecError(f"{source}: {kind}: {said}") from error
        raise invalid_field(error, source) from error
    except SpecError as error:
        raise SpecError(f"{source}: {error}") from error


def _digest(text: str) -> str:
    """A digest of the content, however a tool lays it out, orders its keys or writes numbers."""
    content = json.loads(text, parse_int=float)
    content.pop(DIGEST, None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
