"""Ray's token: made for the user alone, asked for before a cluster is joined, never shown."""

from __future__ import annotations

import os
import socket
import stat
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmpq.remote import token as ray_token
from llmpq.remote.ray_jobs import RayJobs
from llmpq.remote.session import _check_joinable, ray_session
from llmpq.remote.token import check_token, make_token, refused_token, token_file, warn_of_readers
from quant.common.errors import DeviceError, SpecError

VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")
SETUP = "ray._private.authentication.authentication_token_setup"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder without a token, and a umask that lets others read."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what is set meanwhile does not stay
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def wide_umask() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_token_is_made_for_the_user_alone(home: Path) -> None:
    make_token()
    path = home / ".ray" / "auth_token"
    assert token_file() == path
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert len(bytes.fromhex(path.read_text())) == 32
    assert os.listdir(path.parent) == ["auth_token"]


def test_a_token_that_is_there_stays(home: Path) -> None:
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("mine")
    make_token()
    assert (home / ".ray" / "auth_token").read_text() == "mine"
    assert os.listdir(home / ".ray") == ["auth_token"]


@pytest.mark.parametrize("home_is", ["locked", "unknown", "taken"])
def test_a_user_whose_home_cannot_be_written_has_a_token_too(
    home_is: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a container's user without an entry
    if home_is == "unknown":
        monkeypatch.delenv("HOME")
    elif home_is == "locked":
        monkeypatch.setenv("HOME", "/dev/null")
    else:
        (home / ".ray").write_text("a file")
    make_token()
    warn_of_readers()
    assert token_file() is None
    assert len(bytes.fromhex(os.environ["RAY_AUTH_TOKEN"])) == 32
    assert home_is != "taken" or (home / ".ray").read_text() == "a file"


def test_runs_that_start_at_once_share_one_token(home: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        seen = set(pool.map(lambda _: (make_token(), token_file().read_text())[1], range(8)))  # type: ignore[union-attr]
    assert len(seen) == 1
    assert len(seen.pop()) == 64


def test_where_links_cannot_be_made_it_is_still_the_users_own(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(source: object, target: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuses)
    make_token()
    assert mode(home / ".ray" / "auth_token") == 0o600
    assert os.listdir(home / ".ray") == ["auth_token"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RAY_AUTH_MODE", "disabled"),
        ("RAY_AUTH_TOKEN", "given"),
        ("RAY_AUTH_TOKEN_PATH", "/somewhere/token"),
    ],
)
def test_none_is_made_where_none_is_needed(
    name: str, value: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    make_token()
    assert not list(home.iterdir())


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("bits", [0o644, 0o640, 0o602])
def test_a_token_that_others_read_is_told_with_the_remedy(
    named: bool, bits: int, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_token()
    path = home / ".ray" / "auth_token"
    if named:
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path.rename(home / "token")))
        path = home / "token"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_readers()
    path.chmod(bits)
    with pytest.warns(UserWarning, match=rf"mode {bits:04o}.*`chmod 600 {path}`") as told:
        warn_of_readers()
    assert path.read_text() not in str(told[0].message)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "none was found: {home}/.ray/auth_token is missing or empty, and RAY_AUTH_TOKEN"),
        ({"RAY_AUTH_TOKEN": "5ecret"}, "the one in RAY_AUTH_TOKEN is not its own"),
        ({"RAY_AUTH_TOKEN_PATH": "{home}/t"}, "the one in {home}/t (RAY_AUTH_TOKEN_PATH) is not"),
        ({"RAY_AUTH_TOKEN_PATH": "{home}/u"}, "none was found: {home}/u is missing or empty"),
        ({"RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE=disabled keeps one from being sent"),
    ],
)
def test_a_refused_token_is_told_by_its_place(
    variables: dict[str, str], words: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "t").write_text("5ecret")
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(home=home))
    told = str(refused_token("the Ray cluster at h:1"))
    assert words.format(home=home) in told
    assert "the Ray cluster at h:1 wants its token" in told
    assert "5ecret" not in told


@pytest.mark.parametrize("by_variable", [False, True])
@pytest.mark.parametrize(
    "address",
    [
        "user:pa55word@127.0.0.1:1",
        "user:pa55@word@127.0.0.1:1",
        "user:pa55:word/@127.0.0.1:1",
        "us@er:pa55 word@127.0.0.1:1",
        "ray://user:pa55@word://@127.0.0.1:1",
        "http://user:pa55word@127.0.0.1:1",
    ],
)
def test_an_address_with_a_password_is_refused_without_it(
    address: str, by_variable: bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name or by RAY_ADDRESS, and by --submit."""
    monkeypatch.setattr(ray_token, "check_token", None)
    if by_variable:
        monkeypatch.setenv("RAY_ADDRESS", address)
    joined = ray_session(None if by_variable else address)
    for refused in (joined.__enter__, lambda: RayJobs(address)):
        with pytest.raises(SpecError) as found:
            refused()
        assert "127.0.0.1:1" in str(found.value) or "no user and password" in str(found.value)
        assert "pa55" not in found.value.args[0]
        assert "word" not in found.value.args[0].replace("password", "")


@pytest.fixture
def asked(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The mode in which each question to a cluster was asked, with a Ray that takes tokens so."""

    def take_token() -> bool:  # without arguments: Ray before 2.60 knows none
        os.environ["RAY_AUTH_MODE"] = "token"
        return (home / "t").exists()

    monkeypatch.setenv("RAY_AUTH_MODE", "")  # put back at the end, whoever has set it
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setattr(f"{SETUP}.maybe_enable_token_auth_if_token_available", take_token)
    return []


def cluster(asked: list[str | None], *, wants_token: bool) -> Callable[[str], bool]:
    """What answers as a cluster with or without tokens does."""

    def admits(address: str) -> bool:
        asked.append(os.environ.get("RAY_AUTH_MODE"))
        return not wants_token or asked[-1] == "token"

    return admits


def test_a_cluster_without_tokens_is_joined_as_such_though_a_token_lies_here(
    asked: list[str | None], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers bring no token, so that who has the mode on admits none of their answers."""
    (home / "t").write_text("5ecret")
    monkeypatch.setattr(ray_token, "_admits", cluster(asked, wants_token=False))
    check_token("h:1")
    assert asked == [None]
    assert "RAY_AUTH_MODE" not in os.environ


def test_a_cluster_with_tokens_is_asked_again_with_the_one_that_lies_here(
    asked: list[str | None], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_token, "_admits", cluster(asked, wants_token=True))
    with pytest.raises(DeviceError, match="the Ray cluster at h:1 wants its token"):
        check_token("h:1")
    assert asked == [None]
    monkeypatch.delenv("RAY_AUTH_MODE")
    (home / "t").write_text("5ecret")
    check_token("h:1")
    assert asked == [None, None, "token"]


def test_a_mode_that_is_set_is_kept(
    asked: list[str | None], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "t").write_text("5ecret")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray_token, "_admits", cluster(asked, wants_token=True))
    with pytest.raises(DeviceError, match="RAY_AUTH_MODE=disabled keeps one from being sent"):
        check_token("h:1")
    assert asked == ["disabled"]


def test_auto_asks_the_ray_that_was_started_last(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("llmpq.remote.session.check_token", asked.append)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setattr("ray._private.utils.read_ray_address", lambda: address)
        _check_joinable("auto")
    assert asked == [address]
    _check_joinable("auto")  # gone: Ray looks for others itself
    monkeypatch.setattr("ray._private.utils.read_ray_address", lambda: None)
    _check_joinable("auto")
    assert asked == [address]


def test_without_a_home_the_token_is_left_to_ray(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    make_token()
    warn_of_readers()
    assert list(home.iterdir()) == []
