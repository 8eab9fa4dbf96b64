#!/usr/bin/env python3
"""One end of an SCTP association (RFC 9260) over a raw socket, because the kernel of a test may lack SCTP.

    sctp_peer.py serve  ADDRESS PORT NAME     answers each message with NAME and the message, until it is killed
    sctp_peer.py ask    ADDRESS PORT COUNT    opens COUNT associations in turn, sends one message in each, and prints a
                                              line for each: the answer, `refused` (ABORT) or `silence`

It verifies the CRC32c of every packet. For a wrong one it prints `bad checksum` and sends no answer. IPv4 only.
"""
import os
import random
import socket
import struct
import sys
import time

DATA, INIT, INIT_ACK, SACK, SHUTDOWN, SHUTDOWN_ACK = 0, 1, 2, 3, 7, 8
ABORT, COOKIE_ECHO, COOKIE_ACK, SHUTDOWN_COMPLETE = 6, 10, 11, 14
PATIENCE_S = 3


def crc_table():
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ 0x82F63B78 if n & 1 else n >> 1
        yield n


TABLE = list(crc_table())


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def packet(source, destination, tag, *chunks):
    body = b"".join(chunks)
    head = struct.pack("!HHI", source, destination, tag)
    return head + struct.pack("<I", crc32c(head + bytes(4) + body)) + body


def chunk(kind, body=b"", flags=0):
    return struct.pack("!BBH", kind, flags, 4 + len(body)) + body + bytes(-len(body) % 4)


def init(kind, tag, tsn, parameters=b""):
    return chunk(kind, struct.pack("!IIHHI", tag, 65536, 1, 1, tsn) + parameters)


def data(tsn, text):
    return chunk(DATA, struct.pack("!IHHI", tsn, 0, 0, 0) + text, flags=3)


def sack(tsn):
    return chunk(SACK, struct.pack("!IIHH", tsn, 65536, 0, 0))


def chunks(body):
    while len(body) >= 4:
        kind, _, length = struct.unpack("!BBH", body[:4])
        if length < 4:
            return
        yield kind, body[4:length]
        body = body[length + -length % 4:]


class End:
    def __init__(self):
        self.raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_SCTP)

    def receive(self, port, peer=None, deadline=None):
        """The next packet for a port, from `peer` if given: (address, source port, tag, chunks); None after the deadline."""
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            self.raw.settimeout(left)
            try:
                whole, (address, _) = self.raw.recvfrom(65535)
            except socket.timeout:
                return None
            sctp = whole[(whole[0] & 15) * 4:]
            source, destination, tag = struct.unpack("!HHI", sctp[:8])
            if destination != port or (peer and (address, source) != peer):
                continue
            if struct.unpack("<I", sctp[8:12])[0] != crc32c(sctp[:8] + bytes(4) + sctp[12:]):
                print("bad checksum", flush=True)
                continue
            return address, source, tag, list(chunks(sctp[12:]))

    def send(self, address, *fields):
        self.raw.sendto(packet(*fields), (address, 0))


def serve(port, name):
    """The cookie carries the peer's tag and our next TSN, so that an association has no state before COOKIE ECHO."""
    end, peers = End(), {}
    print("ready", flush=True)
    while True:
        address, source, _, found = end.receive(port)
        for kind, body in found:
            if kind == INIT:
                tag, _, _, _, tsn = struct.unpack("!IIHHI", body[:16])
                mine = random.getrandbits(32) or 1
                cookie = struct.pack("!HHIII", 7, 16, tag, mine, tsn)
                end.send(address, port, source, tag, init(INIT_ACK, mine, mine, cookie))
            elif kind == COOKIE_ECHO:
                tag, mine, tsn = struct.unpack("!III", body[:12])
                peers[address, source] = [tag, mine]
                end.send(address, port, source, tag, chunk(COOKIE_ACK))
            elif (address, source) in peers:
                tag, mine = peers[address, source]
                if kind == DATA:
                    text = name.encode() + b" " + body[12:]
                    end.send(address, port, source, tag, sack(struct.unpack("!I", body[:4])[0]), data(mine, text))
                    peers[address, source][1] = mine + 1 & 0xFFFFFFFF
                elif kind == SHUTDOWN:
                    end.send(address, port, source, tag, chunk(SHUTDOWN_ACK))
                elif kind == SHUTDOWN_COMPLETE:
                    del peers[address, source]


def exchange(end, address, port, mine, sent, wanted):
    """Sends until the wanted chunk arrives, and returns (tag, body). Raises on an ABORT and on a timeout."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        end.send(address, mine, port, *sent)
        found = end.receive(mine, (address, port), min(deadline, time.monotonic() + 1))
        for kind, body in found[3] if found else ():
            if kind == ABORT:
                raise ConnectionRefusedError
            if kind == wanted:
                return found[2], body
    raise TimeoutError


def associate(end, address, port, mine, text):
    tag, tsn = random.getrandbits(32) or 1, random.getrandbits(32)
    echoed, answer = exchange(end, address, port, mine, (0, init(INIT, tag, tsn)), INIT_ACK)
    if echoed != tag:
        return "wrong tag"
    theirs = struct.unpack("!I", answer[:4])[0]
    cookie = answer[20:32]  # after the fixed part and the parameter's header
    exchange(end, address, port, mine, (theirs, chunk(COOKIE_ECHO, cookie)), COOKIE_ACK)
    _, answer = exchange(end, address, port, mine, (theirs, data(tsn, text)), DATA)
    end.send(address, mine, port, theirs, sack(struct.unpack("!I", answer[:4])[0]))
    exchange(end, address, port, mine, (theirs, chunk(SHUTDOWN, struct.pack("!I", 0))), SHUTDOWN_ACK)
    end.send(address, mine, port, theirs, chunk(SHUTDOWN_COMPLETE))
    return answer[12:].decode()


def ask(address, port, count):
    end, first = End(), 20000 + os.getpid() % 20000
    for n in range(count):
        try:
            print(associate(end, address, port, first + n, f"hello {n}".encode()), flush=True)
        except ConnectionRefusedError:
            print("refused", flush=True)
        except TimeoutError:
            print("silence", flush=True)


if sys.argv[1] == "serve":
    serve(int(sys.argv[3]), sys.argv[4])
else:
    ask(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
