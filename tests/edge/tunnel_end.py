#!/usr/bin/env python3
"""The tunnel end of a node in modes `ipip` and `gue`: decapsulates packets and passes them to Linux over a TUN device.

    tunnel_end.py DEVICE

Handles IPv4 and IPv6 in IPv4 and IPv6 (RFC 2003, 2473, 4213) and GUE variant 1 on UDP port 6080. The kernel of a test may
lack these tunnels. Prints `ready`, then each pair of versions once, when its first packet arrives: `ipip-4in6`.
"""
import fcntl
import os
import select
import socket
import struct
import sys

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
GUE_PORT = 6080


def tun(name):
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return fd


def sockets():
    """Sockets, each with its tunnel, the outer IP version, and whether received packets include the outer header."""
    found = {}
    for protocol in (4, 41):
        found[socket.socket(socket.AF_INET, socket.SOCK_RAW, protocol)] = ("ipip", 4, True)
        found[socket.socket(socket.AF_INET6, socket.SOCK_RAW, protocol)] = ("ipip", 6, False)
    for family, address, outer in ((socket.AF_INET, "0.0.0.0", 4), (socket.AF_INET6, "::", 6)):
        udp = socket.socket(family, socket.SOCK_DGRAM)
        if family == socket.AF_INET6:
            udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        udp.bind((address, GUE_PORT))
        found[udp] = ("gue", outer, False)
    return found


def main():
    device = tun(sys.argv[1])
    ends = sockets()
    seen = set()
    print("ready", flush=True)
    while True:
        for end in select.select(list(ends), [], [])[0]:
            tunnel, outer, has_header = ends[end]
            packet = end.recv(65535)
            inner = packet[(packet[0] & 15) * 4:] if has_header else packet
            if inner and inner[0] >> 4 in (4, 6):
                name = f"{tunnel}-{inner[0] >> 4}in{outer}"
                if name not in seen:
                    seen.add(name)
                    print(name, flush=True)
                os.write(device, inner)


main()
