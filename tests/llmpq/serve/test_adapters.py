"""Adapters as models of their own names, beside the one that they change."""

from __future__ import annotations

import pytest

from llmpq.serve.options import ServeOptions
from quant.common.errors import SpecError
from tests.llmpq.serve.asking import CHAT, COMPLETIONS, ask, chat, completion, service_of
from tests.llmpq.serve.pretend_engine import PretendEngine


def test_a_request_names_an_adapter_as_its_model() -> None:
    engine = PretendEngine(adapters=("support", "legal"))
    for name in ("pretend", "support", "legal"):
        for path, body in ((COMPLETIONS, completion(model=name)), (CHAT, chat(model=name))):
            answer = ask(path, body, engine)
            assert answer.json()["model"] == name
    asked = [each.adapter for each in engine.seen]
    assert asked == ["", "", "support", "support", "legal", "legal"]
    listed = ask("/v1/models", engine=engine).json()["data"]
    assert [each["id"] for each in listed] == ["pretend", "support", "legal"]
    unknown = ask(COMPLETIONS, completion(model="other"), engine)
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"


def test_the_model_has_a_name_of_its_own() -> None:
    options = ServeOptions(served_model_names=("support",))
    with pytest.raises(SpecError, match="of the model and its adapters must differ"):
        service_of(PretendEngine(adapters=("support",)), options)
