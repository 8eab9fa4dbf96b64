"""The partner of an 802.3ad bundle. It sends LACP (IEEE 802.1AX) on the given interfaces once a second. It prints `ready`
when it listens, and `in sync NAME` when the actor behind interface NAME collects and distributes."""
import select
import socket
import sys
import time

SLOW = bytes.fromhex("0180c2000002")
OURS = bytes.fromhex("0200000000aa")
# Active, short timeout, aggregatable, in sync, collecting, distributing.
STATE = 0x3F


def information(kind, system, key, port, state):
    body = (0x8000).to_bytes(2, "big") + system + key.to_bytes(2, "big") + (0x80).to_bytes(2, "big")
    return bytes([kind, 20]) + body[:10] + (0x8000).to_bytes(2, "big") + port.to_bytes(2, "big") + bytes([state, 0, 0, 0])


def answer(number, theirs):
    actor = information(1, OURS, 1, number, STATE)
    collector = bytes([3, 16, 0, 0]) + bytes(12)
    pdu = bytes([1, 1]) + actor + bytes([2, 20]) + theirs + collector + bytes(52)
    return SLOW + OURS + bytes.fromhex("8809") + pdu


sockets = {}
for name in sys.argv[1:]:
    one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x8809))
    one.bind((name, 0x8809))
    sockets[one] = [name, len(sockets) + 1, bytes(18), False]
print("ready", flush=True)
due = time.monotonic()
while True:
    readable, _, _ = select.select(sockets, [], [], max(0, due - time.monotonic()))
    for one in readable:
        try:
            frame, address = one.recvfrom(2048)
        except OSError:
            # The interface went down.
            continue
        if address[2] == socket.PACKET_OUTGOING or frame[14] != 1:
            continue
        entry = sockets[one]
        # The actor's information follows subtype, version, type and length.
        entry[2] = frame[18:36]
        in_sync = entry[2][14] & 0x38 == 0x38
        if in_sync and not entry[3]:
            print("in sync", entry[0], flush=True)
        entry[3] = in_sync
    if time.monotonic() >= due:
        due += 1
        for one, (_, number, theirs, _) in sockets.items():
            try:
                one.send(answer(number, theirs))
            except OSError:
                # The interface is down.
                pass
