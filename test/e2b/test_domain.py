"""The unmodified Python SDK of E2B, with nothing set but E2B_DOMAIN,
E2B_API_KEY and the authority to trust (SSL_CERT_FILE): TLS, HTTP/2, a host for
each port. It asks the system where a host is, so that the names below the
domain must resolve; where they do not, HTTPS_PROXY names a proxy for which they do."""

import os
import unittest
import urllib.error
import urllib.request

from e2b import Sandbox

DOMAIN = os.environ["E2B_DOMAIN"]


def get(url, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read()


class Domain(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.sbx = Sandbox.create(timeout=120)

    @classmethod
    def tearDownClass(cls):
        cls.sbx.kill()

    def test_commands_and_files(self):
        self.assertEqual(self.sbx.commands.run("seq 100000").stdout.count("\n"), 100_000)
        data = os.urandom(4 << 20)
        self.sbx.files.write("a", data)
        self.assertEqual(self.sbx.files.read("a", format="bytes"), bytearray(data))
        self.assertTrue(Sandbox.connect(self.sbx.sandbox_id).is_running())

    def test_urls(self):
        self.sbx.files.write("a.txt", "by URL")
        self.assertEqual(get(self.sbx.download_url("a.txt")), (200, b"by URL"))
        up = urllib.request.Request(self.sbx.upload_url("b.txt"), b"up", {"Content-Type": "application/octet-stream"}, method="POST")
        with urllib.request.urlopen(up) as reply:
            self.assertEqual(reply.status, 200)
        self.assertEqual(self.sbx.files.read("b.txt"), "up")

    def test_port(self):
        host = self.sbx.get_host(8000)
        self.assertEqual(host, f"8000-{self.sbx.sandbox_id}.{DOMAIN}")
        self.sbx.files.write("www/index.html", "<p>hello</p>")
        self.sbx.commands.run("python3 -m http.server 8000 --directory www", background=True, timeout=0)
        self.sbx.commands.run("until (echo > /dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.1; done")
        self.assertEqual(get(f"https://{host}/index.html"), (200, b"<p>hello</p>"))
        self.assertEqual(get(f"https://{self.sbx.get_host(8001)}/")[0], 502)

    def test_traffic_token(self):
        with Sandbox.create(timeout=60, network={"allow_public_traffic": False}) as sbx:
            url = f"https://{sbx.get_host(8000)}/"
            self.assertEqual(get(url)[0], 403)
            self.assertEqual(get(url, **{"E2B-Traffic-Access-Token": sbx.traffic_access_token})[0], 502)  # let in; nobody listens

    def test_mcp_url(self):
        self.assertEqual(self.sbx.get_mcp_url(), f"https://{self.sbx.get_host(50005)}/mcp")


if __name__ == "__main__":
    unittest.main()
