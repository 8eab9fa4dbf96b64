"""Clients that keep their connections: each sends requests over one connection for as long as it lives.

keep_alive.py CONNECTIONS ADDRESS...

Prints `ready` once every connection has had an answer, then every 200 ms how many answers there were and how many
connections have broken. A connection has 30 s for an answer, so that repeated packets may arrive.
"""

import http.client
import sys
import threading
import time

lock = threading.Lock()
answers, broken, ready = 0, 0, 0


def keep(address):
    global answers, broken, ready
    connection = http.client.HTTPConnection(address, 80, timeout=30)
    is_first = True
    try:
        while True:
            connection.request("GET", "/mtu")
            response = connection.getresponse()
            response.read()
            if response.will_close:
                raise OSError("the server closes connections")
            # http.client would connect again by itself.
            connection.auto_open = 0
            with lock:
                answers += 1
                ready += is_first
            is_first = False
            time.sleep(0.1)
    except (OSError, http.client.HTTPException) as error:
        with lock:
            broken += 1
        print(f"# {address}: {error!r}", file=sys.stderr, flush=True)


count, addresses = int(sys.argv[1]), sys.argv[2:]
for n in range(count):
    threading.Thread(target=keep, args=(addresses[n % len(addresses)],), daemon=True).start()
told = False
while True:
    time.sleep(0.2)
    with lock:
        line = f"{answers} {broken}"
        if ready + broken == count and not told:
            told = True
            print("ready", flush=True)
    print(line, flush=True)
