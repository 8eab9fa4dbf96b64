"""Connections to an echo server, each of which sends a line every 50 ms.

    lines.py ADDRESS PORT NUMBER DIRECTORY

Writes into DIRECTORY/state: answers so far, broken connections, and the longest time without an answer in seconds. Ends
when DIRECTORY/stop exists.
"""
import json
import os
import socket
import sys
import threading
import time

address, port, number, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
lock = threading.Lock()
state = {"answers": 0, "broken": 0, "worst": 0.0}
stop = os.path.join(directory, "stop")


def talk():
    try:
        with socket.create_connection((address, port), 60) as connection:
            connection.settimeout(90)
            lines = connection.makefile("rwb")
            lines.readline()
            while not os.path.exists(stop):
                start = time.monotonic()
                lines.write(b"line\n")
                lines.flush()
                if lines.readline() != b"line\n":
                    raise OSError("the connection was closed")
                with lock:
                    state["answers"] += 1
                    state["worst"] = max(state["worst"], round(time.monotonic() - start, 2))
                time.sleep(0.05)
    except OSError as error:
        with lock:
            state["broken"] += 1
            state["error"] = str(error)


threads = [threading.Thread(target=talk) for _ in range(number)]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    with lock, open(os.path.join(directory, "state.new"), "w") as file:
        json.dump(state, file)
    os.rename(os.path.join(directory, "state.new"), os.path.join(directory, "state"))
    time.sleep(0.2)
