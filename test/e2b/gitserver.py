"""Git over HTTP inside a sandbox, for the suites of git: serves the
repositories of its first argument on 127.0.0.1:8090 to ann, whose token is
"token"."""

import base64
import http.server
import os
import subprocess
import sys


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.headers["Authorization"] != "Basic " + base64.b64encode(b"ann:token").decode():
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Basic realm=git")
            self.end_headers()
            return
        path, _, query = self.path.partition("?")
        cgi = subprocess.run(
            ["git", "http-backend"],
            input=self.rfile.read(int(self.headers["Content-Length"] or 0)),
            stdout=subprocess.PIPE,
            env=os.environ | {
                "GIT_PROJECT_ROOT": sys.argv[1], "GIT_HTTP_EXPORT_ALL": "1", "REMOTE_USER": "ann", "PATH_INFO": path, "QUERY_STRING": query,
                "REQUEST_METHOD": self.command, "CONTENT_TYPE": self.headers["Content-Type"] or "",
                "HTTP_CONTENT_ENCODING": self.headers["Content-Encoding"] or "", "GIT_PROTOCOL": self.headers["Git-Protocol"] or "",
            },
        )
        head, _, body = cgi.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        self.send_response(int(fields.pop("Status", "200").split()[0]))
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET


http.server.ThreadingHTTPServer(("127.0.0.1", 8090), Handler).serve_forever()
