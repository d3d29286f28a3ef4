"""Tools that a chat offers to the model: their fields, and the form of answers that must call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeGuard, get_args

from actors.sampling_options import FORM, checked_form
from quant.common.errors import FieldError

ToolParser = Literal["hermes", "qwen3_coder", "glm45", "llama3", "mistral", "none"]
"""The form in which a model writes calls; none: they are not told apart."""

TOOL_PARSERS: tuple[ToolParser, ...] = get_args(ToolParser)

TOOLS, CHOICE, PARALLEL = "tools", "tool_choice", "parallel_tool_calls"
_REQUIRED = "required"
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "additionalProperties": False}
_NAMED_FORM = '{"type": "function", "function": {"name": …, "parameters": {…}}}'


def _function(tool: Mapping[str, Any]) -> Any:
    """What a tool says of its function; some clients write this without OpenAI's frame."""
    return tool.get("function", tool)


def _name(function: Any) -> str:
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def check_tools(shown: str, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise `FieldError` for a tool that is no function with a name of its own, and for parameters
    that are no schema; the field was given as `shown`.
    """
    names: set[str] = set()
    for number, tool in enumerate(tools):
        place, function = f"{shown}[{number}]", _function(tool)
        name = _name(function)
        if not name:
            raise FieldError(place, f"is no function with a name; give {_NAMED_FORM}")
        if name in names:
            raise FieldError(place, f"is named {name!r:.80} as one before it; rename one of them")
        names.add(name)
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise FieldError(
                f"{place}.function.parameters", "are no JSON schema; give an object, or none"
            )


def is_choice(value: Any) -> bool:
    return value in ("none", "auto", _REQUIRED) or bool(chosen_function(value))


def chosen_function(value: Any) -> str:
    """The function that a `tool_choice` names, in the forms of OpenAI's two interfaces."""
    return _name(_function(value)) if isinstance(value, Mapping) else ""


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """The types of JSON that each parameter may have, by function; none where none is told."""
    found = {}
    for function in map(_function, tools):
        schema = function.get("parameters") or {}
        own = schema.get("properties") if isinstance(schema, Mapping) else None
        if isinstance(own, Mapping):
            found[_name(function)] = {str(name): sorted(_types(each)) for name, each in own.items()}
    return found


def _types(schema: Any) -> set[str]:
    """The types that a schema names, or one of its kinds; what is malformed names none."""
    kinds = [schema] if isinstance(schema, Mapping) else []
    for each in ("anyOf", "oneOf"):
        more = kinds[0].get(each) if kinds else None
        kinds += [kind for kind in more if isinstance(kind, Mapping)] if _is_list(more) else []
    found = set[str]()
    for kind in kinds:
        named, values = kind.get("type"), kind.get("enum", [kind.get("const")])
        found.update(map(str, named if _is_list(named) else [named] if named else []))
        if _is_list(values) and any(isinstance(value, str) for value in values):
            found.add("string")
    return found


def _is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def add_choice(options: dict[str, Any], shown: str, choice: Any, parallel: bool | None) -> None:
    """Add to the `options` of a chat what changes which calls its answer may have.

    Raises `FieldError` of the name `shown` for a choice among tools that are not offered.
    """
    tools = options.get(TOOLS, ())
    if parallel is False:
        options[PARALLEL] = False
    if choice in (None, "none", "auto"):
        return
    if not tools:
        raise FieldError(shown, "asks for a call, but there are no tools; give tools")
    name = chosen_function(choice)
    names = [_name(_function(tool)) for tool in tools]
    if name and name not in names:
        there = ", ".join(f"{each:.40}" for each in names[:10])
        raise FieldError(shown, f"names {name!r:.80}, which is none of the tools: {there}")
    options[CHOICE] = {"type": "function", "function": {"name": name}} if name else _REQUIRED


def forced_sampling(sampling: Mapping[str, Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """`sampling` of a chat, with the form of its answer where `options` have it call a tool: the
    arguments of a function that is named, else a list of calls.

    Raises `FieldError` where the answer is to have another form, or this would be too large.
    """
    if CHOICE not in options:
        return sampling
    if sampling.get(FORM):
        raise FieldError(CHOICE, "asks for a call beside another form of the answer; give one")
    name = chosen_function(options[CHOICE])
    functions = [_function(tool) for tool in options[TOOLS]]
    if name:
        (schema,) = (_parameters(each, "#") for each in functions if _name(each) == name)
    else:
        schema = _calls(functions, most=None if options.get(PARALLEL, True) else 1)
    try:
        return {**sampling, FORM: checked_form({"json": schema})}
    except FieldError as error:  # too much of it
        raise FieldError(TOOLS, f"as a form of the answer: it {error.why}") from error


def _calls(functions: Sequence[Mapping[str, Any]], most: int | None) -> dict[str, Any]:
    """The schema of a list of calls, as vLLM's: `name` and `parameters` of each."""
    kinds = [
        {
            "type": "object",
            "properties": {
                "name": {"const": _name(each)},
                "parameters": _parameters(each, f"#/items/anyOf/{n}/properties/parameters"),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for n, each in enumerate(functions)
    ]
    limit = {} if most is None else {"maxItems": most}
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": kinds}}


def _parameters(function: Mapping[str, Any], place: str) -> Any:
    """The schema of a function's arguments, which are an object, where it stands at `place`."""
    return _moved(function.get("parameters") or _NO_PARAMETERS, place)


def _moved(schema: Any, place: str) -> Any:
    """`schema` with references to parts of itself led to where these stand now."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: place + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for name, value in schema.items()
    }
