"""Admin endpoints: add, drain and remove engines while the proxy runs. Requires the admin token."""

from __future__ import annotations

import hmac
import time
from typing import Any

import msgspec

from vllm_kvoffload.proxy.asgi import Receive, Scope, Send, header, read_body, respond_json
from vllm_kvoffload.proxy.balance import Instance, Pool
from vllm_kvoffload.proxy.core import Core, logger
from vllm_kvoffload.proxy.errors import HttpFailure, RequestRefused
from vllm_kvoffload.proxy.jsontext import decode_json
from vllm_kvoffload.proxy.settings import Address, SettingsError, check_host, check_port, is_wildcard

BODY_LIMIT = 64 << 10


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    host: str
    port: int


class Admin:
    """``GET /admin/instances``, and ``POST /admin/instances/{add,drain,remove}`` with role, host and port."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ``HttpFailure``: 404 if no token is configured, 401 for a wrong one."""
        self._check_token(scope)
        route = (scope["method"], scope["path"])
        if route == ("GET", "/admin/instances"):
            await respond_json(send, 200, self.state())
            return
        action = {"add": self._add, "drain": self._drain, "remove": self._remove}.get(
            scope["path"].removeprefix("/admin/instances/")
        )
        if action is None or scope["method"] != "POST":
            raise HttpFailure.of(404, f"no {route[0]} {route[1]} here", kind="NotFoundError")
        raw = await read_body(receive, BODY_LIMIT, self._core.settings.deadlines.request_body)
        action(*self._named(raw))
        logger.info("proxy: admin %s", scope["path"])
        await respond_json(send, 200, self.state())

    def _check_token(self, scope: Scope) -> None:
        token = self._core.settings.admin_token
        if token is None:
            raise HttpFailure.of(404, "no admin token is set", kind="NotFoundError")
        given = header(scope, b"authorization") or ""
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HttpFailure.of(401, "wrong or missing bearer token", kind="AuthenticationError")

    def _named(self, raw: bytes) -> tuple[Pool, Address]:
        try:
            named = decode_json(raw, _Named)
            pool = {"prefill": self._core.prefillers, "decode": self._core.decoders}[named.role]
            if is_wildcard(named.host):
                raise SettingsError(f"host: {named.host!r} can't be called")
            address = Address(check_host(named.host, "host"), check_port(named.port, "port"))
        except KeyError as error:
            raise RequestRefused(f"role must be prefill or decode, not {error}", "role") from error
        except (msgspec.DecodeError, SettingsError) as error:
            raise RequestRefused(str(error)) from error
        if address == self._core.settings.advertise:
            raise RequestRefused(f"{address} is the proxy's own address", "host")
        return pool, address

    def _add(self, pool: Pool, address: Address) -> None:
        other = next(p for p in self._core.pools if p is not pool)
        if address in other.instances:
            raise RequestRefused(f"{address} is a {other.role} engine already", "role")
        pool.add(address)

    def _drain(self, pool: Pool, address: Address) -> None:
        self._found(pool, address).draining = True

    def _remove(self, pool: Pool, address: Address) -> None:
        self._found(pool, address)
        pool.remove(address)
        self._core.client.forget(address)

    def _found(self, pool: Pool, address: Address) -> Instance:
        instance = pool.instances.get(address)
        if instance is None:
            raise HttpFailure.of(404, f"no {pool.role} engine {address}", kind="NotFoundError")
        return instance

    def state(self) -> dict[str, list[dict[str, Any]]]:
        """Returns load, request counts and health of all engines."""
        now = time.monotonic()
        return {
            pool.role: [
                {
                    "host": i.address.host,
                    "port": i.address.port,
                    "available": i.health.available(now),
                    "down": i.health.down,
                    "draining": i.draining,
                    "requests": i.requests,
                    "load_tokens": i.load_tokens,
                    "ejections": i.health.ejections,
                }
                for i in pool.instances.values()
            ]
            for pool in self._core.pools
        }
