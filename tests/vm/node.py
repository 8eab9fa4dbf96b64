"""An HTTP server that answers each request with one status and the client's address.

    node.py ADDRESS PORT STATUS
"""
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = (self.client_address[0] + "\n").encode()
        self.send_response(int(sys.argv[3]))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
