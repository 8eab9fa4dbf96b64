#!/usr/bin/env python3
"""Asks each address by DNS over UDP again and again, every time from a new port, and prints questions without an answer.

    dns_exchanges.py INTERVAL_MS ADDRESS...

Prints `ready`, then `ADDRESS failed` for each question that got no answer within 5 s, and about once a second `answers N`.
"""
import selectors
import socket
import struct
import sys
import time

PATIENCE = 5.0
QUESTION = struct.pack("!HHHHHH", 7, 0x0100, 1, 0, 0, 0) + b"\x04edge\x00" + struct.pack("!HH", 16, 1)

interval, addresses = float(sys.argv[1]) / 1000, sys.argv[2:]
waiting = selectors.DefaultSelector()
asked = []
answers, told = 0, time.monotonic()
print("ready", flush=True)
due = time.monotonic()
while True:
    now = time.monotonic()
    if now >= due:
        for address in addresses:
            client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            client.setblocking(False)
            client.sendto(QUESTION, (address, 53))
            waiting.register(client, selectors.EVENT_READ)
            asked.append((now, address, client))
        due = max(due + interval, now)
    for key, _ in waiting.select(max(0, due - time.monotonic())):
        key.fileobj.recvfrom(2048)
        waiting.unregister(key.fileobj)
        key.fileobj.close()
        answers += 1
    late = [one for one in asked if one[0] + PATIENCE < now]
    asked = [one for one in asked if one[0] + PATIENCE >= now and one[2].fileno() >= 0]
    for _, address, client in late:
        if client.fileno() >= 0:
            waiting.unregister(client)
            client.close()
            print(address, "failed", flush=True)
    if now - told >= 1:
        told = now
        print("answers", answers, flush=True)
