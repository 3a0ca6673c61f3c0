"""Host names and IP addresses: one way to write each host. Pure."""

from __future__ import annotations

import ipaddress
import re

from vllm_kvoffload.foreign_text import shown

MAX_NAME = 253
"""Characters of the longest host name in DNS."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")  # Docker's names may have "_"
_NUMBER = re.compile(r"\d+|0[xX][0-9A-Fa-f]*")
_SCOPE = re.compile(r"[A-Za-z0-9_.-]{1,32}")


class HostError(ValueError):
    """Not a host that a connection can be made to, or not one that is allowed."""


def canonical_host(text: object, *, scope: bool = False) -> str:
    """A host name in lower case without its final dot, or an address without brackets. Raises HostError.

    Wildcards are refused, and so are forms that only the C library accepts as addresses ("127.1",
    "0x7f000001"): every reader of the result must see the same host. The resolver raises UnicodeError for
    some of the names that are refused here.

    scope: accept an interface name after "%" in an IPv6 address; it means something on one machine only.
    """
    if not isinstance(text, str) or not 0 < len(text) <= MAX_NAME or not text.isascii():
        raise HostError(f"{shown(text)} is no host")
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    plain, percent, interface = inner.partition("%")
    address = ip_address(plain)
    if address is None:
        labels = text.removesuffix(".").split(".")
        if not all(_LABEL.fullmatch(label) for label in labels) or _NUMBER.fullmatch(labels[-1]):
            raise HostError(f"{shown(text)} is no host")
        return ".".join(labels).lower()
    if (inner != text and address.version == 4) or address.is_unspecified or address.is_multicast:
        raise HostError(f"{shown(text)} is no address of a host")
    if percent and not (scope and address.version == 6 and _SCOPE.fullmatch(interface)):
        raise HostError(f"{shown(text)} names an interface, which is not allowed here")
    return f"{address}{percent}{interface}"


def ip_address(text: str) -> Address | None:
    """The address, an IPv4 one if it is mapped to IPv6; None for a name."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
