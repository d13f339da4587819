"""Lets a client in Go call a server in Rust by a Unix socket.

grpc-go names the path of the socket in `:authority`, which is no authority: the kubelet's server, Go itself, takes it,
the h2 library of the stand-in kubelet ends the stream. So each connection goes through here, and the value is replaced.
"""

from __future__ import annotations

import socket
import threading
from pathlib import Path

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEAD = 9
HEADERS = 1
PADDED, PRIORITY = 0x8, 0x20
#: Its place in HPACK's static table.
AUTHORITY = 1


class Relay:
    """Takes the place of the socket at `path`, which is moved aside."""

    def __init__(self, path: Path) -> None:
        self._behind = path.with_name(path.name + ".real")
        path.rename(self._behind)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        # Closing alone would leave the thread in accept().
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                server.connect(str(self._behind))
            except OSError:
                return
            threading.Thread(target=_copy, args=(client, server, _requests), daemon=True).start()
            threading.Thread(target=_copy, args=(server, client, _as_it_is), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket, how) -> None:
    try:
        how(source, sink)
    except OSError:
        pass
    for end in (source, sink):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def _as_it_is(source: socket.socket, sink: socket.socket) -> None:
    while data := source.recv(65536):
        sink.sendall(data)


def _exactly(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = source.recv(count - len(data))
        if not more:
            raise OSError("the connection ended")
        data += more
    return data


def _requests(source: socket.socket, sink: socket.socket) -> None:
    sink.sendall(_exactly(source, len(PREFACE)))
    while True:
        head = _exactly(source, FRAME_HEAD)
        body = _exactly(source, int.from_bytes(head[:3], "big"))
        if head[3] == HEADERS:
            if head[4] & (PADDED | PRIORITY):
                raise OSError("padding and priorities are not read here")
            body = with_authority(body, b"localhost")
            head = len(body).to_bytes(3, "big") + head[3:]
        sink.sendall(head + body)


def with_authority(block: bytes, value: bytes) -> bytes:
    """A block of HPACK (RFC 7541, section 6) with another `:authority`, where that is a literal."""
    at = 0
    while at < len(block):
        first = block[at]
        if first & 0x80:
            _, at = _integer(block, at, 7)
            continue
        if first & 0xE0 == 0x20:
            _, at = _integer(block, at, 5)
            continue
        name, at = _integer(block, at, 6 if first & 0x40 else 4)
        if name == 0:
            at = _string_end(block, at)
        end = _string_end(block, at)
        if name == AUTHORITY:
            return block[:at] + bytes([len(value)]) + value + block[end:]
        at = end
    return block


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    limit = (1 << bits) - 1
    value = block[at] & limit
    at += 1
    if value < limit:
        return value, at
    shift = 0
    while True:
        value += (block[at] & 0x7F) << shift
        shift += 7
        at += 1
        if not block[at - 1] & 0x80:
            return value, at


def _string_end(block: bytes, at: int) -> int:
    length, at = _integer(block, at, 7)
    return at + length
