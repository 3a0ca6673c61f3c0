"""CURVE encryption of the control sockets: only engines with the shared key can exchange messages."""

from __future__ import annotations

import hmac

import zmq
from zmq.utils import z85

from vllm_kvoffload.settings.connectors import EXTRA
from vllm_kvoffload.settings.errors import ConfigError

_ZAP = "inproc://zeromq.zap.01"


class ControlKey:
    """A key pair derived from a secret key (see `read_control_key`); both sides use the same pair.

    Raises ConfigError if this libzmq lacks CURVE.
    """

    def __init__(self, secret: str) -> None:
        if not zmq.has("curve"):
            rule, fix = "this libzmq was built without CURVE", "install pyzmq from a wheel, or unset it"
            raise ConfigError(f"{EXTRA}.control_key_file", "(not shown)", rule, fix)
        self._secret = z85.encode(bytes.fromhex(secret))
        self._public = zmq.curve_public(self._secret)
        self.public = z85.decode(self._public)

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Configures a listening socket; call before it is bound. Its context needs a `Gatekeeper`."""
        socket.curve_server = True
        socket.curve_secretkey = self._secret

    def connect(self, socket: zmq.Socket[bytes]) -> None:
        """Configures a connecting socket; call before it connects."""
        socket.curve_secretkey, socket.curve_publickey = self._secret, self._public
        socket.curve_serverkey = self._public


class Gatekeeper:
    """Admits only holders of one key: libzmq asks it about every connection of a context (ZAP, RFC 27).

    CURVE alone would admit every client that knows the server's public key.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key: ControlKey) -> None:
        self._public = key.public
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.bind(_ZAP)

    def answer(self) -> None:
        """Answers the requests that arrived since the last call."""
        while True:
            try:
                frames = self.socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request = (*frames, b"", b"")[:2]
            same = len(frames) == 7 and frames[5] == b"CURVE" and hmac.compare_digest(frames[6], self._public)
            status = [b"200", b"OK"] if same else [b"400", b"another key"]
            self.socket.send_multipart([version, request, *status, b"", b""])

    def close(self) -> None:
        """Stops answering, so that libzmq refuses new connections."""
        self.socket.close(linger=0)
