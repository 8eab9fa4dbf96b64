#!/usr/bin/env python3
"""UDP datagrams of any size, which the kernel sends in fragments.

    datagrams.py serve PORT ADDRESS...     returns each datagram; prints `ready`
    datagrams.py ask ADDRESS PORT SIZE...  sends a datagram of each size until it returns, at most 30 times, and prints
                                           `SIZE returned` or `SIZE lost`
"""
import os
import select
import socket
import sys


def open_socket(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    udp = socket.socket(family, socket.SOCK_DGRAM)
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    if family == socket.AF_INET6:
        udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return udp


def serve(port, addresses):
    sockets = [open_socket(address) for address in addresses]
    for udp, address in zip(sockets, addresses):
        udp.bind((address, port))
    print("ready", flush=True)
    while True:
        for udp in select.select(sockets, [], [])[0]:
            data, client = udp.recvfrom(65535)
            udp.sendto(data, client)


def returns(udp, server, size):
    data = os.urandom(size)
    for _ in range(30):
        try:
            udp.sendto(data, server)
        except OSError:  # an ICMP error about an earlier one
            continue
        while select.select([udp], [], [], 1)[0]:
            try:
                if udp.recv(65535) == data:
                    return True
            except OSError:
                break
    return False


def ask(address, port, sizes):
    udp = open_socket(address)
    for size in sizes:
        print(size, "returned" if returns(udp, (address, port), size) else "lost", flush=True)


if sys.argv[1] == "serve":
    serve(int(sys.argv[2]), sys.argv[3:])
else:
    ask(sys.argv[2], int(sys.argv[3]), [int(size) for size in sys.argv[4:]])
