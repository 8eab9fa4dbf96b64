"""A UDP server whose clients' addresses come in a PROXY header, version 2, of each datagram.

Arguments: the port for datagrams with a header, and one for those without. It answers each datagram with the address and
port of the client and the payload; one without a valid header on the first port with "no header".
"""

import ipaddress
import select
import socket
import struct
import sys

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
ADDRESS_BYTES = {0x12: 4, 0x22: 16}


def parse(datagram):
    """The client's address and port, and the payload behind the header; None if there is no valid header."""
    if datagram[:13] != SIGNATURE + b"\x21" or len(datagram) < 16:
        return None
    family, length = struct.unpack("!BH", datagram[13:16])
    size = ADDRESS_BYTES.get(family)
    if size is None or length < 2 * size + 4 or len(datagram) < 16 + length:
        return None
    client = ipaddress.ip_address(datagram[16 : 16 + size])
    (port,) = struct.unpack("!H", datagram[16 + 2 * size : 18 + 2 * size])
    return f"{client} {port}", datagram[16 + length :]


def main():
    sockets = {}
    for with_header, port in zip((True, False), map(int, sys.argv[1:])):
        server = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("::", port))
        sockets[server] = with_header
    print("ready", flush=True)
    while True:
        for server in select.select(list(sockets), [], [])[0]:
            datagram, sender = server.recvfrom(65535)
            plain = sender[0].removeprefix("::ffff:") + f" {sender[1]}"
            found = parse(datagram) if sockets[server] else (plain, datagram)
            client, payload = found or ("no header", datagram[:32])
            server.sendto(client.encode() + b" " + payload, sender)


main()
