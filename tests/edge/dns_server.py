#!/usr/bin/env python3
"""A DNS server (RFC 1035) over UDP and TCP. It answers every TXT question with its name, until it is killed.

    dns_server.py PORT NAME [ADDRESS...]

It listens on these addresses, so that answers come from them; without any, on all.
"""
import select
import socket
import struct
import sys


def answer(question, name):
    """The question, and one TXT record of TTL 0 for its name."""
    identity, end = question[:2], 12
    while question[end]:
        end += question[end] + 1
    text = name.encode()
    record = struct.pack("!HHHIHB", 0xC00C, 16, 1, 0, len(text) + 1, len(text)) + text
    return identity + struct.pack("!HHHHH", 0x8180, 1, 1, 0, 0) + question[12:end + 5] + record


def serve_one(listener, name):
    with listener.accept()[0] as connection:
        connection.settimeout(60)
        stream = connection.makefile("rwb", buffering=0)
        length = stream.read(2)
        if length and len(length) == 2:
            reply = answer(stream.read(struct.unpack("!H", length)[0]), name)
            stream.write(struct.pack("!H", len(reply)) + reply)


def main(port, name, addresses):
    by_udp, by_tcp = [], []
    for address in addresses:
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind((address, port))
        by_udp.append(udp)
        by_tcp.append(socket.create_server((address, port), backlog=64))
    print("ready", flush=True)
    while True:
        for end in select.select(by_udp + by_tcp, [], [])[0]:
            if end in by_udp:
                question, client = end.recvfrom(4096)
                end.sendto(answer(question, name), client)
            else:
                try:
                    serve_one(end, name)
                except OSError:
                    pass  # a probe connects and resets


main(int(sys.argv[1]), sys.argv[2], sys.argv[3:] or ["0.0.0.0"])
