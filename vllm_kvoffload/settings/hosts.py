"""Hosts that requests may name: how they are written, and which of them an engine talks to. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm_kvoffload.log import shown
from vllm_kvoffload.settings.errors import ConfigError

LOOPBACK = ("localhost", "127.0.0.0/8", "::1")

MAX_NAME = 253
"""Characters of the longest host name there is."""

_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NUMBER = re.compile(r"\d+|0[xX][0-9A-Fa-f]*")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class HostError(ValueError):
    """No host, or none that may be talked to."""


def canonical_host(text: object) -> str:
    """A host name in lower case, or an address without brackets; raises HostError.

    Wildcards, interface names behind "%", and what only the C library takes for an address ("127.1",
    "0x7f000001") are no hosts: all who look at the result must see the same host.
    """
    if not isinstance(text, str) or not 0 < len(text) <= MAX_NAME or not text.isascii():
        raise HostError(f"{shown(text)} is no host")
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    address = _address(inner)
    if address is None:
        labels = text.removesuffix(".").split(".")
        if not all(_LABEL.fullmatch(label) for label in labels) or _NUMBER.fullmatch(labels[-1]):
            raise HostError(f"{shown(text)} is no host")
        return ".".join(labels).lower()
    if (inner != text and address.version == 4) or address.is_unspecified or address.is_multicast:
        raise HostError(f"{shown(text)} is no address of a host")
    return str(address)


def _address(text: str) -> Address | None:
    if "%" in text:
        return None
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


@dataclass(frozen=True)
class HostList:
    """Hosts that may be talked to. key: the option that says so, for messages.

    names: of hosts and single addresses, canonical. networks: any address in them, but no name of one.
    """

    key: str
    names: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()
    everything: bool = False

    @classmethod
    def parse(cls, key: str, value: Any) -> HostList:
        """Of an option: names, addresses and networks, or ["*"]. Raises ConfigError."""
        if not isinstance(value, (list, tuple)) or not value:
            rule = "must be a list of host names, addresses or networks"
            fix = (
                'write ["10.0.0.0/8", "node1.example"], ["*"] for any host, or leave it out for this machine'
            )
            raise ConfigError(key, value, rule, fix)
        if list(value) == ["*"]:
            return cls(key, everything=True)
        names: set[str] = set()
        networks: list[Network] = []
        for entry in value:
            try:
                _add(entry, names, networks)
            except ValueError as error:
                rule = f"{shown(entry)} is neither a host name nor an address nor a network"
                fix = 'write entries as in ["node1.example", "10.0.0.5", "10.0.0.0/8"], or ["*"] for any host'
                raise ConfigError(key, value, rule, fix) from error
        return cls(key, frozenset(names), tuple(networks))

    @classmethod
    def told(cls, key: str, hosts: Iterable[object]) -> HostList:
        """The default: this machine, and the engine's own configuration; what is no host is left out."""
        names: set[str] = set()
        networks: list[Network] = []
        for entry in (*LOOPBACK, *hosts):
            try:
                _add(entry, names, networks)
            except ValueError:
                continue
        return cls(key, frozenset(names), tuple(networks))

    def check(self, host: object) -> str:
        """The canonical host; raises HostError for none, and for one that is not listed."""
        name = canonical_host(host)
        if self.everything or name in self.names:
            return name
        address = _address(name)
        if address is not None and any(address in network for network in self.networks):
            return name
        raise HostError(f"host {name} is not in {self.key}: set that option of this engine if it may be used")


def _add(entry: object, names: set[str], networks: list[Network]) -> None:
    """Raises ValueError."""
    if isinstance(entry, str) and "/" in entry:
        networks.append(ipaddress.ip_network(entry, strict=False))
    else:
        names.add(canonical_host(entry))
