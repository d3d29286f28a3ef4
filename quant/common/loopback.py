"""Names of this machine: in the addresses that servers listen on, and in headers of requests."""

from __future__ import annotations

from ipaddress import ip_address

MOST_PORT = 65_535


def is_of_this_machine(host: str) -> bool:
    """Whether `host` is a loopback address or `localhost`."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def host_in(header: str) -> str:
    """The name in the header `Host` of a request, without its port.

    A web page can have its own name lead to 127.0.0.1, and so reach a server that lets everybody of
    this machine in; the browser then sends that name.
    """
    name = header.strip().lower()
    if not name.endswith("]"):  # of an IPv6 address without port
        name = name.rpartition(":")[0] or name
    return name.removeprefix("[").removesuffix("]")
