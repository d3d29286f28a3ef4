"""The process that runs a model's tokenizer and chat template, on one row at a time.

It is started by the path of this file and imports nothing of this project but one rule of `quant`,
`markers.py` and, where rows have forms, how stages compile these, so that it is ready as soon as
transformers is; torch, which tokenizers do without, is kept out. Its settings come as JSON in its
only argument, tasks as one JSON object a line, and each is answered by one line before the next is
looked at: `{"text": …}` and `{"chat": [messages]}`, with the row's own `options`, by `ids`, or by
the `tokens` or `characters` that are too many; `{"ids": […], "before": […]}` by the `text` that ids
add to that of those before, `{"lists": [[before, ids], …]}` by `texts`, `{"form": …}` by the `text`
of the form as stages keep it, behind reasoning where there is a `has_begun`; any by the `error` of
what (`of`) failed. The first line that it writes says what was loaded, or why nothing was.

The kernel bounds it: address space (RLIMIT_AS), and an alarm that nobody handles for seconds, which
holds for native code too and where nobody is left to watch.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FLOOR_CHARACTERS = 1 << 17
"""Characters that are tokenized whatever was planned, which takes some milliseconds."""

SLACK = 4
"""Characters that a normalizer may take away for each that a token stands for."""

ERROR_CHARACTERS = 500
_WARNINGS = 5

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
          "config.json", "vocab.json", "chat_template.json")  # fmt: skip
_OF_TEMPLATE = ("tools", "documents", "add_generation_prompt", "continue_final_message")
"""Options of a row that templates are given beside its `chat_template_kwargs`."""


class RowTokenizer:
    """A loaded tokenizer; `most_tokens` of a row, None for any number.

    `options` are those of rows that do not say: of a row, and the text of another `chat_template`.
    `markers`: what the model's reasoning stands between, None where it has no such tokens.
    `tool_parser`: how it writes calls, None where that is not known.
    """

    def __init__(self, folder: Path, most_tokens: int | None, options: Mapping[str, Any]) -> None:
        from llmpq.tokenizing.markers import decoder_of, reasoning_markers, tool_parser

        self._options = options
        self.tokenizer = _load(folder, self._options.get("chat_template"))
        self.most_tokens = most_tokens
        self.markers = reasoning_markers(self.tokenizer)
        known = inspect.signature(self.tokenizer.apply_chat_template).parameters
        self._reserved = {"messages", *known} - set(_OF_TEMPLATE)
        self.most_characters: int | None = None
        if most_tokens is not None:
            longest = max(map(len, self.tokenizer.get_vocab()), default=1)
            self.most_characters = max(FLOOR_CHARACTERS, SLACK * most_tokens * longest)
        self._probed = self._probe()
        plain = self._probe(add_special_tokens=False)
        places = (n for n in range(len(self._probed)) if self._probed[n:][: len(plain)] == plain)
        self._begin = self._probed[: next(places, 0)]  # what the tokenizer puts before a text
        self.tool_parser = self._options.get("tool_parser") or tool_parser(self.tokenizer)
        self._decoder = decoder_of(self.tokenizer, self.markers, self.tool_parser)
        self._vocabulary: Any = None

    def answer(self, line: str) -> dict[str, Any]:
        """The answer to a task; a row's content may make third-party code raise anything."""
        of = "tokenizer"
        try:
            task = json.loads(line)
            if "ids" in task:
                return {"text": self._text(task["before"], task["ids"])}
            if "lists" in task:
                return {"texts": [self._text(*each) for each in task["lists"]]}
            if "form" in task:
                of = "form"
                return {"text": self._kept_form(task["form"], task.get("has_begun"))}
            own = task.get("options", {})
            adds = {**self._options, **own}.get("add_special_tokens", "chat" not in task)
            if "chat" not in task:
                return self._encoded(task["text"], adds)
            of = "chat template"
            text = self._render(task["chat"], own)
            of = "tokenizer"
            found = self._encoded(text, adds)
            found.pop("begins_with", None)  # templates begin so, which is no news
            return found
        except BaseException as error:  # a Rust panic is a BaseException
            words = error_words(error)
            if not isinstance(error, Exception) and self._probe() != self._probed:
                raise  # what panicked is broken from now on
            return {"error": words, "of": of}

    def _text(self, before: list[int], ids: list[int]) -> str:
        from quant.common.text import text_after

        text = text_after(self._decoder, before, ids)
        text.encode()  # half a surrogate pair could not be written
        return text

    def _kept_form(self, form: str, has_begun: bool | None) -> str:
        """`form`, or that of an answer which may reason before, unless `has_begun` is None;
        ValueError for one that stages could not keep answers to.
        """
        from actors.stage.grammar import behind_reasoning, compiled, vocabulary_of

        if self._vocabulary is None:
            self._vocabulary = vocabulary_of(self.tokenizer)
        if self.markers is not None and has_begun is not None:
            opening, closing = map(self._lark_of, self.markers)
            form = behind_reasoning(form, opening, closing, has_begun)
        compiled(form, self._vocabulary)
        return form

    def _lark_of(self, marker: str) -> str:
        number = self.tokenizer.get_vocab().get(marker)
        return json.dumps(marker) if number is None else f"<[{number}]>"

    def _render(self, messages: list[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        kwargs = dict(self._options.get("chat_template_kwargs", {}))
        kwargs |= options.get("chat_template_kwargs") or {}
        kwargs |= {name: options[name] for name in _OF_TEMPLATE if name in options}
        kwargs.setdefault("add_generation_prompt", not kwargs.get("continue_final_message"))
        try:
            self._check_kwargs(kwargs)
            text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        except ValueError as error:
            if self.tokenizer.chat_template:  # some tokenizers have their own way instead
                raise
            raise ValueError(
                "the model has none; give a prompt instead of messages, or a template "
                "(--chat_template)"
            ) from error
        return text

    def _check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raise ValueError for what a template is not given, or would leave out without a word."""
        for name in self._reserved & kwargs.keys():
            raise ValueError(f"{name} is no variable of templates; leave it out of the kwargs")
        for name in ("tools", "documents"):
            if kwargs.get(name) and self.tokenizer.chat_template:
                template = self.tokenizer.get_chat_template(tools=kwargs.get("tools"))
                if name not in template:
                    raise ValueError(f"it has no place for {name}; put them into a message")

    def _encoded(self, text: str, adds: bool) -> dict[str, Any]:
        """Ids of `text`, with special tokens where `adds`, but not those that it begins with."""
        if self.most_characters is not None and len(text) > self.most_characters:
            return {"characters": len(text)}
        ids = self.tokenizer(text, verbose=False, add_special_tokens=adds)["input_ids"]
        before = len(self._begin)
        has_own = adds and before > 0 and ids[: 2 * before] == self._begin * 2
        if has_own:
            ids = ids[before:]
        if self.most_tokens is not None and len(ids) > self.most_tokens:
            return {"tokens": len(ids)}
        own = {"begins_with": self.tokenizer.decode(self._begin)} if has_own else {}
        return {"ids": ids, **own}

    def _probe(self, **options: Any) -> Any:
        """Tokens of a fixed text, which stay the same as long as the tokenizer is whole."""
        try:
            return self.tokenizer("a 1", verbose=False, **options)["input_ids"]
        except BaseException as error:  # as in `answer`
            return error_words(error)


def error_words(error: BaseException) -> str:
    """An error in words, cut where they are many."""
    if isinstance(error, MemoryError):
        return "more memory than a row may take"
    if "trust_remote_code" in str(error):  # far behind, where the folder's name is long
        return "it brings code of its own, which llmpq does not run"
    text = str(error)[:ERROR_CHARACTERS]
    spoken = isinstance(error, ValueError) or type(error).__name__ == "TemplateError"
    if text and spoken:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _load(folder: Path, chat_template: str | None) -> Any:
    """Load the tokenizer; raises what transformers raises, and `ValueError` without tokens."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not tokenizer.vocab_size:
        raise ValueError("its vocabulary is empty")
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    templates = tokenizer.chat_template or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    for template in templates.values():
        compile_template(template)
    return tokenizer


_NEW_TAG = re.compile("unknown tag '(?!end|el)")
"""An unknown tag may be one of a later transformers, unless it ends or continues something."""


class BrokenTemplateError(ValueError):
    """A chat template that cannot be compiled."""


def compile_template(template: Any) -> None:
    """Raise `BrokenTemplateError` for a chat template that no row could be rendered with."""
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """The tag that transformers adds to jinja."""

        tags = {"generation"}  # noqa: RUF012  (jinja's own form)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    try:
        if not isinstance(template, str):
            raise TypeError(f"it is a {type(template).__name__}, not a text")
        environment.from_string(template)
    except TemplateSyntaxError as error:
        if not _NEW_TAG.search(str(error.message)):
            where = f" (line {error.lineno} of it)"
            raise BrokenTemplateError(f"{error.message}{where}") from error
    except (SyntaxError, RecursionError, MemoryError, TypeError, ValueError) as error:
        raise BrokenTemplateError(error_words(error)) from error


def _faulty_file(folder: Path, error: BaseException) -> str:
    """The file that `error` is about, as far as that can be told, else the folder."""
    if isinstance(error, BrokenTemplateError):
        own = folder / "chat_template.jinja"
        return str(own if own.exists() else folder / "tokenizer_config.json")
    for name in _FILES:
        try:
            if (folder / name).exists():
                content = json.loads((folder / name).read_bytes())
                if not isinstance(content, dict):
                    return str(folder / name)
        except (OSError, ValueError, RecursionError, MemoryError):
            return str(folder / name)
    if (folder / "tokenizer.json").exists():
        try:
            from tokenizers import Tokenizer

            if Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(False):
                return str(folder)
        except BaseException:  # as in `RowTokenizer.answer`
            pass
        return str(folder / "tokenizer.json")
    return str(folder)


def limit_memory(more_bytes: int) -> None:
    """Let the process have so much beyond what it has; no limit where the system tells no size."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * resource.getpagesize() + more_bytes
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def alarm(seconds: float) -> None:
    """The kernel ends the process after so long, unless it is told another time (0: never)."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def answer_line(answer: Mapping[str, Any]) -> bytes:
    ids = answer.get("ids")
    if ids is None or len(answer) > 1:
        return json.dumps(answer).encode()
    return b'{"ids": %a}' % ids  # Python's form of a list of integers is JSON's, and quicker


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.texts) < _WARNINGS and "PyTorch" not in record.getMessage():
            self.texts.append(record.getMessage()[:ERROR_CHARACTERS])


def _first_line(
    folder: Path, most_tokens: int | None, options: Mapping[str, Any]
) -> tuple[RowTokenizer | None, dict[str, Any]]:
    noted = _Warnings()
    logging.getLogger("transformers").addHandler(noted)
    try:
        row_tokenizer = RowTokenizer(folder, most_tokens, options)
    except BaseException as error:  # as in `RowTokenizer.answer`
        return None, {"error": error_words(error), "file": _faulty_file(folder, error)}
    finally:
        logging.getLogger("transformers").removeHandler(noted)
    return row_tokenizer, {
        "most_characters": row_tokenizer.most_characters,
        "markers": row_tokenizer.markers,
        "tool_parser": row_tokenizer.tool_parser,
        "warnings": noted.texts,
    }


def serve(settings: Mapping[str, Any]) -> None:
    """Load, then answer until there are no more tasks."""
    channel = os.dup(1)
    os.dup2(2, 1)  # prints of libraries are no answers
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # has `quant`, for `RowTokenizer`

    def send(content: bytes) -> None:
        left = memoryview(content + b"\n")
        while left:
            left = left[os.write(channel, left) :]

    limit_memory(settings["load_bytes"])
    alarm(settings["load_s"])
    options = settings["options"]
    row_tokenizer, first = _first_line(Path(settings["folder"]), settings["most_tokens"], options)
    alarm(0)
    send(json.dumps(first).encode())
    if row_tokenizer is None:
        return
    limit_memory(settings["row_bytes"])
    row_s = settings["row_s"]
    for line in sys.stdin:
        alarm(row_s)
        answer = answer_line(row_tokenizer.answer(line))
        alarm(0)  # reading the answer may take as long as it likes
        send(answer)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    try:
        serve(json.loads(sys.argv[1]))
    except BrokenPipeError:  # the process that asked has ended
        os._exit(0)
