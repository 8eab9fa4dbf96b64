"""One end of an SCTP association by the kernel's SCTP, over a socket that is bound to no address.

    sctp.py serve PORT               answers each message
    sctp.py ask ADDRESS PORT SECONDS  sends a message each second, and prints `answer` for each answer
"""
import socket
import sys
import time

SCTP = 132


def serve(port):
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, SCTP)
    listener.bind(("", port))
    listener.listen(8)
    while True:
        peer, _ = listener.accept()
        try:
            while data := peer.recv(100):
                peer.send(data)
        except OSError as error:
            print(error, flush=True)


def ask(address, port, seconds):
    peer = socket.socket(socket.AF_INET, socket.SOCK_STREAM, SCTP)
    peer.settimeout(30)
    peer.connect((address, port))
    for _ in range(seconds):
        peer.send(b"ask!")
        print("answer" if peer.recv(100) == b"ask!" else "another", flush=True)
        time.sleep(1)


if sys.argv[1] == "serve":
    serve(int(sys.argv[2]))
else:
    ask(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
