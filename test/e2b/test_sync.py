"""The unmodified Python SDK of E2B, its blocking client, against Airlock.

It reads E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY, as the SDK does.
"""

import io
import logging
import os
import threading
import time
import unittest
import urllib.error
import urllib.request
import uuid
from datetime import datetime, timedelta, timezone

from e2b import (
    ALL_TRAFFIC,
    E2B,
    AuthenticationException,
    BuildException,
    CommandExitException,
    FileNotFoundException,
    FileType,
    InvalidArgumentException,
    NotEnoughSpaceException,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxNotRunningException,
    SandboxQuery,
    SandboxState,
    Secret,
    SecretException,
    Template,
    TemplateException,
    TimeoutException,
    Volume,
    VolumeException,
)


class OneSandbox(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.sbx = Sandbox.create(timeout=120, metadata={"suite": "sync", "a b": "c&d=e"}, envs={"GLOBAL": "from create"})

    @classmethod
    def tearDownClass(cls):
        cls.sbx.kill()

    def test_run(self):
        out, err = [], []
        r = self.sbx.commands.run('echo one; echo two >&2; printf "é…🜁"', on_stdout=out.append, on_stderr=err.append)
        self.assertEqual((r.exit_code, r.stdout, r.stderr), (0, "one\né…🜁", "two\n"))
        self.assertEqual(("".join(out), "".join(err)), (r.stdout, r.stderr))

    def test_failure(self):
        with self.assertRaises(CommandExitException) as e:
            self.sbx.commands.run("echo partial; echo why >&2; exit 3")
        e = e.exception
        self.assertEqual((e.exit_code, e.stdout, e.stderr, e.error), (3, "partial\n", "why\n", "exit status 3"))

    def test_much_output(self):
        r = self.sbx.commands.run("seq 1 300000")
        self.assertEqual(len(r.stdout), 1_988_895)
        self.assertTrue(r.stdout.endswith("\n299999\n300000\n"))

    def test_split_character(self):
        out = []
        r = self.sbx.commands.run(r"printf '\xf0\x9f'; sleep 0.3; printf '\x9c\x81'", on_stdout=out.append)
        self.assertEqual((r.stdout, "".join(out)), ("🜁", "🜁"))

    def test_envs_and_cwd(self):
        r = self.sbx.commands.run('echo "$GLOBAL|$MINE|$E2B_SANDBOX|$E2B_SANDBOX_ID"; pwd', envs={"MINE": "from run"}, cwd="/tmp")
        self.assertEqual(r.stdout, f"from create|from run|true|{self.sbx.sandbox_id}\n/tmp\n")
        with self.assertRaisesRegex(InvalidArgumentException, "does not exist"):
            self.sbx.commands.run("true", cwd="/no/such/dir")

    def test_users(self):
        self.assertEqual(self.sbx.commands.run("whoami; pwd").stdout, "user\n/home/user\n")
        self.assertEqual(self.sbx.commands.run("whoami; id -u", user="root").stdout, "root\n0\n")
        for call in (
            lambda: self.sbx.commands.run("true", user="nobody-here"),
            lambda: self.sbx.files.read("/etc/passwd", user="nobody-here"),
            lambda: self.sbx.files.list("/", user="nobody-here"),
        ):
            with self.assertRaisesRegex(AuthenticationException, "invalid username: 'nobody-here'"):
                call()

    def test_background(self):
        h = self.sbx.commands.run("cat; echo done", background=True, stdin=True)
        mine = [p for p in self.sbx.commands.list() if p.pid == h.pid]
        self.assertEqual((len(mine), mine[0].cmd, mine[0].args[-1]), (1, "/bin/bash", "cat; echo done"))
        self.sbx.commands.send_stdin(h.pid, "hello\n")
        h.send_stdin("again\n")
        self.sbx.commands.stream_input(h.pid, iter(["by ", b"stream", "\n"]))
        h.close_stdin()
        self.assertEqual(h.wait().stdout, "hello\nagain\nby stream\ndone\n")
        self.assertFalse(any(p.pid == h.pid for p in self.sbx.commands.list()))

    def test_close_stdin(self):
        h = self.sbx.commands.run("cat", background=True, stdin=True)
        self.sbx.commands.close_stdin(h.pid)
        self.assertEqual(h.wait().exit_code, 0)
        h = self.sbx.commands.run("sleep 60", background=True)
        with self.assertRaisesRegex(SandboxException, "stdin is not enabled"):
            self.sbx.commands.send_stdin(h.pid, "x")
        self.assertTrue(h.kill())

    def test_iterate(self):
        h = self.sbx.commands.run("echo out; echo err >&2", background=True)
        self.assertEqual(sorted((out or "") + (err or "") for out, err, _ in h), ["err\n", "out\n"])

    def test_connect_and_kill(self):
        h = self.sbx.commands.run("echo up; sleep 60", background=True)
        second = self.sbx.commands.connect(h.pid)
        self.assertEqual(second.pid, h.pid)
        self.assertTrue(self.sbx.commands.kill(h.pid))
        for one in (h, second):
            with self.assertRaises(CommandExitException) as e:
                one.wait()
            self.assertEqual(e.exception.exit_code, -1)
        self.assertFalse(self.sbx.commands.kill(h.pid))
        with self.assertRaises(NotFoundException):
            self.sbx.commands.connect(999_999)

    def test_disconnect(self):
        h = self.sbx.commands.run("sleep 0.5; exit 5", background=True)
        h.disconnect()
        with self.assertRaises(CommandExitException) as e:
            self.sbx.commands.connect(h.pid).wait()
        self.assertEqual(e.exception.exit_code, 5)

    def test_timeout(self):
        began = time.monotonic()
        with self.assertRaises(TimeoutException):
            self.sbx.commands.run("sleep 987", timeout=1)
        self.assertLess(time.monotonic() - began, 10)

    def test_pty(self):
        seen = bytearray()
        h = self.sbx.pty.create(PtySize(cols=80, rows=24), cwd="/tmp", envs={"IN": "pty"})
        self.sbx.pty.resize(h.pid, PtySize(cols=100, rows=30))
        self.sbx.pty.send_stdin(h.pid, b"stty size; pwd; echo $IN\n")
        self.sbx.pty.stream_input(h.pid, iter([b"echo str", b"eamed; exit\n"]))
        self.assertEqual(h.wait(on_pty=seen.extend).exit_code, 0)
        for want in (b"30 100\r\n", b"/tmp\r\n", b"pty\r\n", b"streamed\r\n"):
            self.assertIn(want, bytes(seen))

    def test_pty_connect_and_kill(self):
        h = self.sbx.pty.create(PtySize(cols=80, rows=24))
        second = self.sbx.pty.connect(h.pid)
        self.assertTrue(self.sbx.pty.kill(h.pid))
        with self.assertRaises(CommandExitException):
            second.wait()
        self.assertFalse(self.sbx.pty.kill(h.pid))

    def test_files(self):
        f = self.sbx.files
        info = f.write("dir/of/text é.txt", "Grüße\n")
        self.assertEqual((info.name, info.path, info.type), ("text é.txt", "/home/user/dir/of/text é.txt", FileType.FILE))
        self.assertEqual(f.read("dir/of/text é.txt"), "Grüße\n")
        every = bytes(range(256))
        f.write("/tmp/bytes", every)
        self.assertEqual(f.read("/tmp/bytes", format="bytes"), bytearray(every))
        f.write("/tmp/bytes", io.BytesIO(every * 2))
        self.assertEqual(f.read("/tmp/bytes", format="bytes", gzip=True), bytearray(every * 2))
        f.write("/tmp/zipped", every * 1000, gzip=True)
        self.assertEqual(b"".join(f.read("/tmp/zipped", format="stream")), every * 1000)
        f.write("empty", "")
        self.assertEqual(f.read("empty"), "")
        f.write("/root/mine", "root's", user="root")
        self.assertEqual(f.read("/root/mine", user="root"), "root's")
        with self.assertRaises(SandboxException):
            f.read("/root/mine")
        with self.assertRaises(FileNotFoundException):
            f.read("missing")
        with self.assertRaises(InvalidArgumentException):
            f.read("/tmp")
        many = f.write_files([{"path": "many/a", "data": "A"}, {"path": "many/b", "data": b"B"}])
        self.assertEqual(sorted(i.path for i in many), ["/home/user/many/a", "/home/user/many/b"])

    def test_big_file(self):
        data = os.urandom(16 << 20)
        self.sbx.files.write("big", io.BytesIO(data))
        self.assertEqual(self.sbx.files.read("big", format="bytes"), bytearray(data))
        self.sbx.files.remove("big")

    def test_directories(self):
        f = self.sbx.files
        self.assertTrue(f.make_dir("tree/inner"))
        self.assertFalse(f.make_dir("tree/inner"))
        f.write("tree/b", "b")
        f.write("tree/inner/a", "a")
        self.assertEqual([(e.name, e.type) for e in f.list("tree")], [("b", FileType.FILE), ("inner", FileType.DIR)])
        self.assertEqual([e.name for e in f.list("tree", depth=2)], ["b", "inner", "a"])
        info = f.get_info("tree/b")
        self.assertEqual((info.size, info.owner, info.permissions), (1, "user", "-rw-r--r--"))
        self.assertEqual(f.rename("tree/b", "tree/deep/c").path, "/home/user/tree/deep/c")
        self.assertFalse(f.exists("tree/b"))
        self.assertTrue(f.exists("tree/deep/c"))
        f.remove("tree")
        self.assertFalse(f.exists("tree"))
        for call in (f.list, f.get_info, lambda path: f.rename(path, "x")):
            with self.assertRaises(FileNotFoundException):
                call("tree")

    def test_urls(self):
        up = urllib.request.Request(self.sbx.upload_url("signed.txt"), b"by URL", {"Content-Type": "application/octet-stream"}, method="POST")
        self.assertEqual(urllib.request.urlopen(up).status, 200)
        self.assertEqual(urllib.request.urlopen(self.sbx.download_url("signed.txt", use_signature_expiration=60)).read(), b"by URL")
        with self.assertRaises(urllib.error.HTTPError) as e:
            urllib.request.urlopen(self.sbx.download_url("signed.txt", use_signature_expiration=-60))
        self.assertEqual(e.exception.code, 401)
        e.exception.close()

    def test_full_disk(self):
        self.sbx.commands.run("fallocate -l 1020M /tmp/full", user="root")
        try:
            with self.assertRaises(NotEnoughSpaceException):
                self.sbx.files.write("more", os.urandom(16 << 20))
        finally:
            self.sbx.files.remove("/tmp/full", user="root")

    def test_info_timeout_connect(self):
        self.sbx.set_timeout(600)
        info = self.sbx.get_info()
        self.assertEqual((info.sandbox_id, info.state), (self.sbx.sandbox_id, SandboxState.RUNNING))
        self.assertEqual(info.metadata, {"suite": "sync", "a b": "c&d=e"})
        left = info.end_at - datetime.now(timezone.utc)
        self.assertTrue(timedelta(seconds=590) < left <= timedelta(seconds=601), left)
        again = Sandbox.connect(self.sbx.sandbox_id, timeout=30)  # never shortens
        self.assertGreater(again.get_info().end_at, info.end_at - timedelta(seconds=2))
        self.assertEqual(again.commands.run("echo same").stdout, "same\n")
        self.assertTrue(again.is_running())
        self.assertEqual(Sandbox.get_info(self.sbx.sandbox_id).envd_version, info.envd_version)
        Sandbox.set_timeout(self.sbx.sandbox_id, 500)

    def test_metrics(self):
        for _ in range(60):
            metrics = self.sbx.get_metrics()
            if metrics:
                break
            time.sleep(0.5)
        m = metrics[-1]
        self.assertEqual((m.cpu_count, m.mem_total, m.disk_total), (2, 512 << 20, 1 << 30))
        self.assertGreater(m.mem_used, 0)
        self.assertTrue(0 <= m.cpu_used_pct <= 100, m)
        past = datetime.now(timezone.utc) - timedelta(hours=2)
        self.assertEqual(self.sbx.get_metrics(start=past, end=past + timedelta(hours=1)), [])
        self.assertTrue(self.sbx.get_metrics(start=past, end=datetime.now(timezone.utc)))


class Lives(unittest.TestCase):
    def test_create_with_every_option(self):
        with self.assertLogs("airlock.test", logging.INFO):
            sbx = Sandbox.create(
                "base",
                timeout=90,
                metadata={"user": "ünï", "empty": ""},
                envs={"A": "from create"},
                secure=True,
                allow_internet_access=False,
                network={
                    "allow_out": lambda ctx: ["example.com", "1.1.1.1"],
                    "deny_out": [ALL_TRAFFIC],
                    "allow_public_traffic": True,
                    "mask_request_host": "localhost:${PORT}",
                    "https_ports": [8443],
                },
                lifecycle={"on_timeout": "kill", "auto_resume": False},
                logger=logging.getLogger("airlock.test"),
                request_timeout=30,
                retries=1,
                api_headers={"X-Of-Ours": "ignored"},
            )
        with sbx:
            info = sbx.get_info()
            self.assertEqual((info.template_id, info.metadata, info.allow_internet_access), ("base", {"user": "ünï", "empty": ""}, False))
            self.assertEqual(info.lifecycle, {"on_timeout": "kill", "auto_resume": False})
            self.assertEqual((info.network["allow_out"], info.network["deny_out"]), (["example.com", "1.1.1.1"], [ALL_TRAFFIC]))
            self.assertEqual((info.network["mask_request_host"], info.network["https_ports"]), ("localhost:${PORT}", [8443]))
            self.assertTrue(timedelta(seconds=90) <= info.end_at - info.started_at < timedelta(seconds=100))
            self.assertEqual(sbx.commands.run("echo $A").stdout, "from create\n")
        self.assertFalse(sbx.is_running())

    def test_idempotency_key(self):
        key = str(uuid.uuid4())
        first = Sandbox.create(timeout=60, idempotency_key=key)
        try:
            self.assertEqual(Sandbox.create(timeout=60, idempotency_key=key).sandbox_id, first.sandbox_id)
            with self.assertRaisesRegex(SandboxException, "409: .*Idempotency-Key"):
                Sandbox.create(timeout=61, idempotency_key=key)
        finally:
            first.kill()

    def test_list(self):
        run = uuid.uuid4().hex
        made = [Sandbox.create(timeout=60, metadata={"run": run, "n": str(n)}) for n in range(3)]
        ids = [s.sandbox_id for s in made]

        def found(order=None, **query):
            pages = Sandbox.list(query=SandboxQuery(**query), order=order, limit=2)
            all = []
            while pages.has_next:
                all += pages.next_items()
            return [s.sandbox_id for s in all]

        try:
            pages = Sandbox.list(query=SandboxQuery(metadata={"run": run}, state=[SandboxState.RUNNING]), limit=2)
            first = pages.next_items()
            self.assertEqual((len(first), pages.has_next), (2, True))
            rest = Sandbox.list(query=SandboxQuery(metadata={"run": run}), next_token=pages.next_token)
            self.assertEqual(([s.sandbox_id for s in rest.next_items()], rest.has_next), ([ids[0]], False))
            self.assertEqual(found(metadata={"run": run}), ids[::-1])
            self.assertEqual(found(metadata={"run": run}, order="asc"), ids)
            self.assertEqual(found(metadata={"run": run, "n": "1"}), [ids[1]])
            self.assertEqual(found(metadata={"run": run}, state=[SandboxState.PAUSED]), [])
            self.assertEqual(found(metadata={"run": run}, template="other"), [])
            self.assertEqual(found(metadata={"run": run}, started_after=made[1].get_info().started_at, order="asc"), ids[1:])
        finally:
            for s in made:
                s.kill()

    def test_client(self):
        client = E2B(api_key=os.environ["E2B_API_KEY"])
        sbx = client.Sandbox.create(timeout=60)
        self.assertTrue(client.Sandbox.kill(sbx.sandbox_id))
        self.assertFalse(Sandbox.kill(sbx.sandbox_id))

    def test_kill(self):
        sbx = Sandbox.create(timeout=60)
        h = sbx.commands.run("sleep 60", background=True)
        pty = sbx.pty.create(PtySize(cols=80, rows=24))
        killer = threading.Timer(0.3, sbx.kill)
        killer.start()
        for one in (h, pty):
            with self.assertRaisesRegex(SandboxNotRunningException, "killed or reached"):
                one.wait()
        killer.join()
        self.assertFalse(sbx.is_running())
        self.assertFalse(sbx.kill())
        for call in (lambda: sbx.commands.run("true"), sbx.commands.list, lambda: sbx.files.list("/"), lambda: sbx.files.read("x")):
            with self.assertRaises(SandboxNotRunningException):
                call()
        for call in (sbx.get_info, lambda: sbx.set_timeout(60), sbx.get_metrics, sbx.connect):
            with self.assertRaises(SandboxNotFoundException):
                call()

    def test_end_of_life(self):
        with Sandbox.create(timeout=2) as sbx:
            with self.assertRaises(SandboxNotRunningException):
                sbx.commands.run("sleep 60")
            self.assertFalse(sbx.is_running())

    def test_refused(self):
        with self.assertRaisesRegex(AuthenticationException, "the API key is not known"):
            Sandbox.create(api_key="e2b_" + "0" * 40)
        with self.assertRaisesRegex(SandboxException, "404: template 'no-such-template' not found"):
            Sandbox.create("no-such-template")
        with self.assertRaisesRegex(SandboxException, "400: Timeout must be greater than 0"):
            Sandbox.create(timeout=0)

    def test_template_exists(self):
        self.assertTrue(Template.exists("base"))
        self.assertFalse(Template.alias_exists("no-such"))

    def test_template_described(self):
        template = Template().from_base_image().set_envs({"HELLO": "Hello"}).run_cmd("echo $HELLO")
        self.assertIn("RUN echo $HELLO", Template.to_dockerfile(template))
        self.assertIn("echo $HELLO", Template.to_json(template))

    def test_not_supported(self):
        sbx = Sandbox.create(timeout=60)
        try:
            for error, what, call in [
                (SandboxException, "pausing", sbx.pause),
                (SandboxException, "pausing", sbx.beta_pause),
                (SandboxException, "pausing", lambda: sbx.pause(mode="filesystem", strict=True)),
                (SandboxException, "forking", sbx.fork),
                (SandboxException, "snapshots", lambda: sbx.create_snapshot("a", mode="filesystem")),
                (SandboxException, "snapshots", lambda: sbx.list_snapshots().next_items()),
                (SandboxException, "templates of your own", lambda: Sandbox.delete_snapshot("base/snap:default")),
                (SandboxException, "autoPause", lambda: Sandbox.create(lifecycle={"on_timeout": "pause"})),
                (SandboxException, "autoPause", lambda: Sandbox.create(lifecycle={"on_timeout": {"action": "pause", "mode": "filesystem"}})),
                (SandboxException, "autoPause", lambda: Sandbox.create(lifecycle={"on_timeout": "pause", "auto_resume": True})),
                (SandboxException, "mcp", lambda: Sandbox.create("base", mcp={"browserbase": {}})),
                (SandboxException, "volumeMounts", lambda: Sandbox.create(volume_mounts={"/v": "volume"})),
                (SandboxException, "iam", lambda: Sandbox.create(iam={"tokens": {"aws": Secret.iam_token(audience="a", token_type="JWT-SVID")}})),
                (SandboxException, "network.rules with .*", lambda: Sandbox.create(network={"rules": {"a.example": [{"transform": {"headers": {"A": Secret.fill("s")}}}]}})),
                (BuildException, "templates of your own", lambda: Template.build(Template().from_base_image().run_cmd("true"), "mine")),
                (BuildException, "templates of your own", lambda: Template.build_in_background(Template().from_image("debian"), "mine")),
                (TemplateException, "templates of your own", lambda: Template.assign_tags("mine:v1", "v2")),
                (TemplateException, "templates of your own", lambda: Template.remove_tags("mine", "v2")),
                (TemplateException, "templates of your own", lambda: Template.get_tags("mine")),
                (VolumeException, "volumes", lambda: Volume.create("v")),
                (VolumeException, "volumes", lambda: Volume.connect("v")),
                (VolumeException, "volumes", lambda: Volume.get_info("v")),
                (VolumeException, "volumes", Volume.list),
                (VolumeException, "volumes", lambda: Volume.destroy("v")),
                (SecretException, "secrets", lambda: Secret.create("s", "value")),
                (SecretException, "secrets", lambda: Secret.update("s", "v")),
                (SecretException, "secrets", lambda: Secret.get_info("s")),
                (SecretException, "secrets", lambda: Secret.list().next_items()),
                (SecretException, "secrets", lambda: Secret.exists("s")),
                (SecretException, "secrets", lambda: Secret.destroy("s")),
            ]:
                with self.subTest(what), self.assertRaisesRegex(error, f"501: (this Airlock does not support {what}.* yet|{what} is not supported by this Airlock yet: leave it out)"):
                    call()
        finally:
            sbx.kill()


if __name__ == "__main__":
    unittest.main()
