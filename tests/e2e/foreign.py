"""Another program on a socket of Berth or of the kubelet: a client of HTTP/2 by hand, so that nothing has to be installed."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from say import TestError, until

_PATH = "/v1beta1.DevicePlugin/ListAndWatch"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
#: More than all device lists of a run.
_ROOM = 2**30
#: A read wakes up this often to see whether it is to end.
_WAKE_SECONDS = 0.2
_RETRY_SECONDS = 0.001
#: The longest wait for a part of a response.
_CALL_SECONDS = 10


class ForeignStream:
    """Streams the devices of `resource`, and opens the next stream when one ends, until the `with` block ends."""

    def __init__(self, plugins: Path, resource: str) -> None:
        name = hashlib.sha256(resource.encode()).hexdigest()[:16]
        self._socket = plugins / f"berth-{name}.sock"
        self._lists = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ForeignStream:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()

    def next_list(self) -> None:
        """Waits for a list that has not come yet: it streams."""
        before = self._lists
        until("a list on the stream of another program", 30, lambda: self._lists > before, every=0.01)

    def is_streaming(self) -> bool:
        return self._lists > 0 and self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.wait(_RETRY_SECONDS):
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.connect(str(self._socket))
                    connection.settimeout(_WAKE_SECONDS)
                    self._stream(connection)
            except OSError:
                # Berth makes its socket again after a restart of the kubelet.
                continue

    def _stream(self, connection: socket.socket) -> None:
        for _ in _messages(connection, _PATH, self._stop):
            self._lists += 1


def call(path: Path, method: str) -> None:
    """Calls a method whose request has no fields, and returns when its response is here."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(path))
        connection.settimeout(_CALL_SECONDS)
        if next(_messages(connection, method), None) is None:
            raise TestError(f"{path}: {method} has no response")


def _messages(connection: socket.socket, method: str, stop: threading.Event | None = None) -> Iterator[bytes]:
    """The messages of a call whose request has no fields, until the other side ends it."""
    window = (4).to_bytes(2, "big") + _ROOM.to_bytes(4, "big")
    begin = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, window)
    begin += _frame(_WINDOW, 0, 0, _ROOM.to_bytes(4, "big"))
    begin += _frame(_HEADERS, _END_HEADERS, 1, _head(method)) + _frame(_DATA, _END_STREAM, 1, bytes(5))
    connection.sendall(begin)
    messages = b""
    while True:
        head = _read(connection, 9, stop)
        kind, flags = head[3], head[4]
        payload = _read(connection, int.from_bytes(head[:3], "big"), stop)
        if kind == _DATA:
            messages += payload
            while len(messages) >= 5 and len(messages) >= 5 + int.from_bytes(messages[1:5], "big"):
                size = 5 + int.from_bytes(messages[1:5], "big")
                yield messages[5:size]
                messages = messages[size:]
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            connection.sendall(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
        if kind in (_RESET, _GOAWAY) or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            return


def _read(connection: socket.socket, size: int, stop: threading.Event | None) -> bytes:
    """So many bytes. An `OSError` where the connection ends first, or this is to end."""
    read = b""
    while len(read) < size:
        try:
            more = connection.recv(size - len(read))
        except socket.timeout:
            if stop is None or stop.is_set():
                raise
            continue
        if not more:
            raise ConnectionResetError("closed")
        read += more
    return read


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _head(method: str) -> bytes:
    """The head of the call, each field written out: no table and no Huffman code is needed for that."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    coded = b""
    for name, value in fields.items():
        coded += bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return coded
