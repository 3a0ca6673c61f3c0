"""Allow-lists of hosts named by requests, to which an engine may connect. No I/O."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm_kvoffload.foreign_text import shown
from vllm_kvoffload.hostnames import HostError, canonical_host, ip_address
from vllm_kvoffload.settings.errors import ConfigError

LOOPBACK = ("localhost", "127.0.0.0/8", "::1")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class HostList:
    """Hosts that an engine may connect to. key: the option that lists them, for messages.

    names: canonical host names and single addresses. networks: allow their addresses, but not names that
    resolve to them.
    """

    key: str
    names: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()
    everything: bool = False

    @classmethod
    def parse(cls, key: str, value: Any) -> HostList:
        """Parses an option: names, addresses and networks, or ["*"]. Raises ConfigError."""
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
    def default(cls, key: str, hosts: Iterable[object]) -> HostList:
        """The default: this machine and the given hosts; entries that are not hosts are skipped."""
        names: set[str] = set()
        networks: list[Network] = []
        for entry in (*LOOPBACK, *hosts):
            try:
                _add(entry, names, networks)
            except ValueError:
                continue
        return cls(key, frozenset(names), tuple(networks))

    def check(self, host: object) -> str:
        """Returns the canonical host. Raises HostError: not a host, or not listed."""
        name = canonical_host(host)
        if self.everything or name in self.names:
            return name
        address = ip_address(name)
        if address is not None and any(address in network for network in self.networks):
            return name
        raise HostError(f"host {name} is not in {self.key}: set that option of this engine if it may be used")


def _add(entry: object, names: set[str], networks: list[Network]) -> None:
    """Adds an entry to one of the two. Raises ValueError: not a host or network."""
    if isinstance(entry, str) and "/" in entry:
        networks.append(ipaddress.ip_network(entry, strict=False))
    else:
        names.add(canonical_host(entry))
