"""A form of several parts (RFC 7578), read as it comes: fields in memory, its file handed on."""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from llmpq.serve.wire.errors import bad_request

MOST_FIELDS = 16
"""Fields of a form: those that are known are fewer."""

FIELD_BYTES = 1024
"""Most bytes of a field."""

_FILE = "file"


class MultipartForm:
    """Takes the bytes of a form; raises `ApiError` (400) for one that is malformed.

    `fields` have their texts, the file's part its content and `filename`, which is None before the
    part has come.
    """

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._is_whole = False
        self._is_file = False
        self._name = ""
        self._value = bytearray()
        self._header = bytearray()
        self._header_value = bytearray()
        self._disposition = b""
        self._file = bytearray()
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_part_data": self._add_data,
                    "on_part_end": self._end_part,
                    "on_header_field": self._add_header,
                    "on_header_value": self._add_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._name_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise bad_request(f"the form's boundary cannot be used: {error}") from error

    def feed(self, data: bytes) -> bytes:
        """The bytes of the file in the next bytes of the form."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise bad_request(f"the form is malformed: {error}") from error
        found = bytes(self._file)
        self._file.clear()
        return found

    def close(self) -> None:
        """Raise unless the form is complete."""
        if not self._is_whole:
            raise bad_request("the form is cut off before its last boundary")

    def _begin_part(self) -> None:
        self._disposition = b""
        self._value.clear()

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header.clear()
        self._header_value.clear()

    def _name_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if not self._name:
            raise bad_request("a part of the form has no name")
        self._is_file = self._name == _FILE
        if self._name in self.fields or (self._is_file and self.filename is not None):
            raise bad_request("a field of the form is given twice", self._name)
        if not self._is_file:
            return
        if b"filename" not in options:
            raise bad_request("file is a text; send it as a file, with a name", _FILE)
        self.filename = options[b"filename"].decode("utf-8", "replace")

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._file += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > FIELD_BYTES:
            raise bad_request(f"a field has more than {FIELD_BYTES} bytes", self._name)

    def _end_part(self) -> None:
        if self._is_file:
            return
        if len(self.fields) >= MOST_FIELDS:
            raise bad_request(f"the form has more than {MOST_FIELDS} fields")
        self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_whole = True
