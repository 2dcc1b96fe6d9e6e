"""The connections between the launchers of one job: plain sockets, one JSON object per line, a heartbeat both ways.

The hub's port and a random token are published in the rendezvous store, so a stray connection is dropped at its first
line. Nothing is unpickled, and a line has a bounded length. A peer that closes its connection, or is silent for longer
than the limit, is gone: hosts die without a word, and a cable that is pulled closes no connection.
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator

from deepspeed.errors import UsageError
from deepspeed.launcher.cluster.hub import Hub, Message

BEAT_S = 0.5
SILENCE_S = 3.0  # DS_HOST_TIMEOUT_S changes it
_MAX_LINE_BYTES = 8 << 20
_FAREWELL_S = 1.0


def seconds_from(variable: str, default: float) -> float:
    """A positive number of seconds from the environment. Raises UsageError for anything else."""
    text = os.environ.get(variable)
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{variable}={text} is not a number of seconds; unset it for {default:g}")
    return seconds


def silence_limit() -> float:
    """Seconds without a heartbeat after which a host counts as dead."""
    return seconds_from("DS_HOST_TIMEOUT_S", SILENCE_S)


class Connection:
    """One socket that carries messages; :meth:`messages` reads, everything else may be called from any thread."""

    def __init__(self, sock: socket.socket, *, silence_s: float) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(silence_s)
        self._socket = sock
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.last_heard = time.time()
        self.ending = ""

    def send(self, message: Message) -> None:
        """Send one message; when that fails the connection ends, which its reader learns."""
        with self._lock:
            try:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                self._over.set()

    def beat(self) -> None:
        """Send heartbeats from a thread of their own until the end."""

        def beats() -> None:
            while not self._over.wait(BEAT_S):
                self.send({"kind": "beat"})

        threading.Thread(target=beats, daemon=True).start()

    def messages(self) -> Iterator[Message]:
        """All messages but heartbeats; ends with the connection, and ``ending`` then says how ('host X ...')."""
        buffer = b""
        try:
            while chunk := self._socket.recv(65536):
                self.last_heard = time.time()
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if message["kind"] != "beat":
                        yield message
                if len(buffer) > _MAX_LINE_BYTES:
                    raise ValueError("a line without end")
            self.ending = "closed its connection: its launcher was killed or the host went down"
        except TimeoutError:
            self.ending = f"has not been heard for {self._silence_s:g} s"
        except OSError as error:
            self.ending = f"is no longer connected ({error.strerror or error})"
        except (ValueError, KeyError, TypeError) as error:
            self.ending = f"sent what no launcher of this version sends ({error})"
        finally:
            self._over.set()

    def leave(self) -> None:
        """Close for writing: what was sent still arrives, and then the peer's reader ends."""
        self._over.set()
        with self._lock, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close at once; a reader in another thread ends too."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class HubServer:
    """Lets the launchers of other nodes join a hub; ``address`` is what they need to know."""

    def __init__(self, hub: Hub, fingerprint: str, *, silence_s: float) -> None:
        self._hub = hub
        self._fingerprint = fingerprint
        self._silence_s = silence_s
        self._token = secrets.token_hex(16)
        self._admitting = threading.Lock()
        self._members: dict[int, tuple[Connection, threading.Thread]] = {}
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=1024
        )
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """JSON of port and token, for the store."""
        return json.dumps({"port": self._listener.getsockname()[1], "token": self._token})

    def send(self, node: int, message: Message) -> None:
        """Send to the launcher of ``node``, if it is connected."""
        if node in self._members:
            self._members[node][0].send(message)

    def close(self) -> None:
        """Stop listening; every member has time to read its last message."""
        self._listener.close()
        for connection, _ in self._members.values():
            connection.leave()
        end = time.monotonic() + _FAREWELL_S
        for connection, thread in self._members.values():
            thread.join(max(0.0, end - time.monotonic()))
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(
                target=self._serve, args=(Connection(sock, silence_s=self._silence_s),), daemon=True
            ).start()

    def _serve(self, connection: Connection) -> None:
        messages = connection.messages()
        node = self._admit(connection, next(messages, None))
        if node is None:
            connection.leave()
            connection.close()
            return
        try:
            for message in messages:
                self._hub.handle(node, message)
        except (ValueError, KeyError, TypeError) as error:
            connection.ending = f"sent what no launcher of this version sends ({error})"
        connection.close()
        self._hub.lose(node, last_heard=connection.last_heard, how=connection.ending)

    def _admit(self, connection: Connection, hello: Message | None) -> int | None:
        """The node rank of a peer that may take part; one that may not is told why, a stranger nothing."""
        if not isinstance(hello, dict) or not hmac.compare_digest(str(hello.get("token")), self._token):
            return None
        node = hello.get("node")
        with self._admitting:
            if hello.get("fingerprint") != self._fingerprint:
                refusal = (
                    "it was started with other hosts or slots than node 0; give every node the same hostfile "
                    "and filters"
                )
            elif not isinstance(node, int) or node == 0 or node in self._members:
                refusal = f"a launcher with --node_rank {node} is in this job already; give every node its own"
            else:
                self._members[node] = (connection, threading.current_thread())
                connection.beat()
                if self._hub.join(node):
                    return node
                del self._members[node]
                refusal = "the job has ended already"
        connection.send({"kind": "refused", "why": refusal})
        return None


def join_hub(host: str, address: str, node: int, fingerprint: str, *, silence_s: float) -> Connection:
    """Connect the launcher of ``node`` to the hub on ``host``; ``address`` is :attr:`HubServer.address`.

    Raises OSError when no connection comes about.
    """
    where = json.loads(address)
    connection = Connection(socket.create_connection((host, where["port"]), timeout=silence_s), silence_s=silence_s)
    connection.send({"kind": "join", "token": where["token"], "node": node, "fingerprint": fingerprint})
    connection.beat()
    return connection
