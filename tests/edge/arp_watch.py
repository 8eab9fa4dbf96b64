"""Asks by ARP for addresses again and again, and prints whenever other stations answer for one than before.

arp_watch.py INTERFACE INTERVAL_MS ADDRESS...
Prints `ready`, then lines of seconds (monotonic), address, and the sorted Ethernet addresses of all that answered one and
the same request (`-` for none). Each request has a sender's address of its own, by which answers are told apart.
"""
import select
import socket
import struct
import sys
import time

interface, interval, addresses = sys.argv[1], float(sys.argv[2]) / 1000, sys.argv[3:]
own = bytes.fromhex(open(f"/sys/class/net/{interface}/address").read().strip().replace(":", ""))
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0806))
wire.bind((interface, 0x0806))
# Answers that take longer than this do not count for their request.
PATIENCE = 0.5
NUMBERS = 200


def request(address, number):
    ethernet = b"\xff" * 6 + own + b"\x08\x06"
    sender = socket.inet_aton(f"192.0.3.{number}")
    return ethernet + struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1) + own + sender + bytes(6) + socket.inet_aton(address)


last = {}
rounds = []
number = 0
print("ready", flush=True)
due = time.monotonic()
while True:
    now = time.monotonic()
    if now >= due and len(rounds) < NUMBERS:
        number = (number + 1) % NUMBERS
        rounds.append((now, number, {address: set() for address in addresses}))
        for address in addresses:
            wire.send(request(address, number))
        due = max(due + interval, now)
    while rounds and rounds[0][0] + PATIENCE < now:
        at, _, answers = rounds.pop(0)
        for address, stations in answers.items():
            if last.get(address) != stations:
                last[address] = stations
                print(f"{at:.4f}", address, ",".join(sorted(stations)) or "-", flush=True)
    if select.select([wire], [], [], max(0, min(due - time.monotonic(), 0.02)))[0]:
        frame = wire.recv(2048)
        if len(frame) >= 42 and frame[20:22] == b"\x00\x02" and frame[38:41] == bytes([192, 0, 3]):
            address, asked = socket.inet_ntoa(frame[28:32]), frame[41]
            for _, of_round, answers in rounds:
                if of_round == asked and address in answers:
                    answers[address].add(frame[22:28].hex(":"))
