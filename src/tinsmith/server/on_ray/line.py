"""The connection between the API process and the thread of a worker on a Ray cluster, without anybody in between.

What is said there is what a process below the API hears and says (`worker_process.py`): a byte for the worker whenever
there is work, and a line of JSON for the API whenever the worker has something to say. Ray carries neither, as it takes
some milliseconds for a call. The worker listens, at the address of its node; who may call is told by Ray.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from contextlib import suppress

import msgspec

from tinsmith.server.messages import Message
from tinsmith.server.on_ray.messages import LineAddress

CALL_SECONDS = 120.0
"""For the API to hear where to call, and to do so."""
SECRET_SECONDS = 5.0
"""For whoever calls to say the secret."""


class Line:
    """The worker's end. What may be called in several threads is `tell`."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family)
        self.address = LineAddress(host, self._listening.getsockname()[1], secrets.token_hex(16))
        self._lock = threading.Lock()

    def wait_for_call(self) -> int:
        """Gives back the descriptor of the connection, for a `Bell`. Nobody else is listened to from then on."""
        self._listening.settimeout(CALL_SECONDS)
        with self._listening:
            caller = self._listening.accept()[0]
            while not self._is_ours(caller):
                caller.close()
                caller = self._listening.accept()[0]
        caller.settimeout(None)
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._caller = caller
        return caller.fileno()

    def _is_ours(self, caller: socket.socket) -> bool:
        """In one breath, or not at all: nobody else is heard meanwhile."""
        secret, said = self.address.secret.encode(), b""
        end = time.monotonic() + SECRET_SECONDS
        with suppress(OSError):
            while len(said) < len(secret) and (left := end - time.monotonic()) > 0:
                caller.settimeout(left)
                more = caller.recv(len(secret) - len(said))
                if not more:
                    break
                said += more
        return hmac.compare_digest(said, secret)

    def tell(self, message: Message) -> None:
        with self._lock, suppress(OSError):  # the server is gone, which the bell will tell
            self._caller.sendall(msgspec.json.encode(message) + b"\n")
