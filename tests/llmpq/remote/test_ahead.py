"""What stages import is prepared ahead of a command that runs them, and ends with it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llmpq.cli.main import main
from llmpq.remote import session
from llmpq.remote.session import prepared_ahead, prepared_forks


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is prepared and ended."""
    found: list[str] = []

    def prepare(variables: dict[str, str]) -> SimpleNamespace:
        found.append("prepared")
        return SimpleNamespace(close=lambda: found.append("ended"))

    monkeypatch.setattr(session, "WorkerForks", prepare)
    monkeypatch.setattr(session, "visible_gpus", lambda: ())
    monkeypatch.setattr(session, "prepared_ahead", prepared_ahead)  # not as for other tests
    for name in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_who_takes_what_was_prepared_ends_it(done: list[str]) -> None:
    with prepared_ahead():
        taken = prepared_forks("local")
        assert taken is not None
        assert done == ["prepared"]
        assert prepared_forks("local") is not taken
    assert done == ["prepared"] * 2


def test_a_ray_that_is_joined_has_no_use_for_it(done: list[str]) -> None:
    with prepared_ahead():
        assert prepared_forks("10.0.0.1:6379") is None
        assert done == ["prepared", "ended"]
    assert done == ["prepared", "ended"]


def test_a_command_begins_with_it_and_ends_what_it_did_not_use(done: list[str]) -> None:
    command = ["run", "--plan", "nowhere.json", "--input", "x", "--output", "y"]
    assert main(command) == 2
    assert done == ["prepared", "ended"]
    assert main([*command, "--address=auto"]) == 2
    assert done == ["prepared", "ended"]
