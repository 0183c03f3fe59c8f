"""The network of a sandbox with the unmodified Python SDK, as network.test.mjs
has it for JavaScript: what a client asks for narrows, and what is open follows."""

import hashlib
import json
import os
import threading
import time
import unittest
from urllib.parse import urlsplit
from urllib.request import urlopen

from e2b import ALL_TRAFFIC, CommandExitException, Sandbox, SandboxException, SandboxNotFoundException

NET = {k: v for k, v in os.environ.items() if k.startswith("NET_")}
OPEN, OTHER, CLOSED, SECURE, SECRET = (NET["NET_" + k] for k in ["OPEN", "OTHER", "CLOSED", "SECURE", "SECRET"])


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def host(url):
    return urlsplit(url).hostname


class Network(unittest.TestCase):
    def box(self, **options):
        sbx = Sandbox.create(timeout=120, **options)
        self.addCleanup(sbx.kill)
        return sbx

    def status(self, sbx, url):
        r = sbx.commands.run(f"curl -s -m 20 -o /dev/null -w '%{{http_code}}' '{url}' || echo \" curl $?\"")
        return r.stdout.strip().removeprefix("000 ")

    def test_narrower(self):
        sbx = self.box(network={"deny_out": [ALL_TRAFFIC], "allow_out": [host(OPEN), host(CLOSED)]})
        self.assertEqual(self.status(sbx, OPEN), "200")
        self.assertEqual(self.status(sbx, OTHER), "curl 6")
        self.assertEqual(self.status(sbx, CLOSED), "403")
        offline = self.box(allow_internet_access=False)
        self.assertEqual(self.status(offline, OPEN), "curl 6")

    def test_update_network(self):
        sbx = self.box()
        began, began_raw = threading.Event(), threading.Event()
        streams = [
            (sbx.commands.run(f"curl -sN {OTHER}/events", background=True, timeout=60), began),
            (sbx.commands.run(f"exec 3<>/dev/tcp/{host(OTHER)}/{NET['NET_TCP_PORT']}; cat <&3; exit 7", background=True, timeout=60), began_raw),
        ]
        ends = []

        def follow(handle, event):
            try:
                handle.wait(on_stdout=lambda _: event.set())
                ends.append(0)
            except CommandExitException as e:
                ends.append(e.exit_code)

        threads = [threading.Thread(target=follow, args=s) for s in streams]
        for t in threads:
            t.start()
        self.assertTrue(began.wait(30) and began_raw.wait(30))
        sbx.update_network({"deny_out": [ALL_TRAFFIC], "allow_out": [host(OPEN), host(CLOSED)]})
        at = time.monotonic()
        for t in threads:
            t.join(30)
        self.assertLess(time.monotonic() - at, 2)
        self.assertNotIn(0, ends)
        self.assertEqual(len(ends), 2)
        self.assertEqual(self.status(sbx, OPEN), "200")
        self.assertEqual(self.status(sbx, CLOSED), "403")
        self.assertEqual(sbx.get_info().network["allow_out"], [host(OPEN), host(CLOSED)])
        Sandbox.update_network(sbx.sandbox_id, {"allow_internet_access": False})
        self.assertEqual(self.status(sbx, OPEN), "curl 6")
        sbx.update_network({})
        self.assertEqual(self.status(sbx, OTHER), "200")

    def test_refused(self):
        sbx = self.box()
        for network, text in [
            ({"deny_out": ["example.com"]}, "network.denyOut"),
            ({"allow_out": ["example.com"]}, "0.0.0.0/0"),
            ({"egress_proxy": {"address": "proxy.example"}}, "400: network.egressProxy.address is not"),
            ({"egress_proxy": {"address": "169.254.169.254:1080"}}, "403: network.egressProxy is not permitted"),
            ({"egress_proxy": {"address": "proxy.example:1080", "tls": {"ca_cert": "none"}}}, "400: network.egressProxy.tls.caCert is no list"),
            ({"dns_servers": ["1.1.1.1"]}, "400: network.dnsServers cannot be chosen"),
            ({"dns_servers": []}, "400: network.dnsServers cannot be chosen"),
        ]:
            with self.subTest(text), self.assertRaisesRegex(SandboxException, text):
                sbx.update_network(network)
        with self.assertRaises(SandboxNotFoundException):
            Sandbox.update_network("inone", {})

    def test_rules(self):
        headers = [{"transform": {"headers": {"Authorization": SECRET}}}]
        sbx = self.box(network={"rules": {host(SECURE): headers}})
        ask = f"curl -s {SECURE}/authorization"
        self.assertEqual(sbx.commands.run(ask).stdout, digest(SECRET))
        self.assertEqual(sbx.commands.run(f"curl -s {OPEN}/authorization").stdout, digest(""))
        self.assertEqual(sbx.get_info().network["rules"][host(SECURE)][0]["transform"]["headers"], {"Authorization": "(hidden)"})
        sbx.update_network({})
        self.assertEqual(sbx.commands.run(ask).stdout, digest(""))

    def test_egress_proxy(self):
        user = "user-of-the-proxy-py"
        proxy = {"address": NET["NET_PROXY"], "username": user, "password": NET["NET_PROXY_PASSWORD"]}
        secure = {**proxy, "address": NET["NET_PROXY_TLS"]}
        alias = {**proxy, "address": NET["NET_PROXY_ALIAS"]}

        def asked():
            with urlopen(f"{NET['NET_PROXY_ASKED']}?user={user}") as r:
                return json.load(r)

        way = f"{NET['NET_OPEN_ADDRESS']}:443"
        sbx = self.box(network={"deny_out": [ALL_TRAFFIC], "allow_out": [host(SECURE)], "egress_proxy": proxy})
        self.assertEqual(self.status(sbx, SECURE), "200")
        self.assertEqual(self.status(sbx, OTHER), "curl 6")
        # Code in the sandbox does not get to the proxy by this.
        self.assertEqual(self.status(sbx, "http://" + NET["NET_PROXY"]), "curl 6")
        self.assertEqual(asked(), [way])
        self.assertEqual(sbx.get_info().network["egress_proxy"], {"address": NET["NET_PROXY"], "username": "(hidden)"})
        for proxy, info in [
            ({**secure, "tls": True}, {}),
            ({**secure, "tls": {"ca_cert": NET["NET_PROXY_CA"]}}, {}),
            ({**alias, "tls": {"server_name": "proxy.airlock.test"}}, {"server_name": "proxy.airlock.test"}),
        ]:
            sbx.update_network({"egress_proxy": proxy})
            self.assertEqual(self.status(sbx, SECURE), "200")
            self.assertEqual(asked(), [way])
            self.assertEqual(sbx.get_info().network["egress_proxy"], {"address": proxy["address"], "username": "(hidden)", "tls": info})
        # Whose certificate does not fit is told nothing, and gets nothing.
        for proxy in [{**alias, "tls": True}, {**proxy, "tls": True, "address": NET["NET_PROXY"]}, {**secure, "tls": {"ca_cert": NET["NET_PROXY_OTHER_CA"]}}, secure]:
            sbx.update_network({"egress_proxy": proxy})
            self.assertIn(self.status(sbx, SECURE), ["502", "504"])
            self.assertEqual(asked(), [])
        with self.assertRaisesRegex(SandboxException, "network.egressProxy is not permitted"):
            Sandbox.create(network={"egress_proxy": {"address": "10.0.0.1:1080"}})


if __name__ == "__main__":
    unittest.main()
