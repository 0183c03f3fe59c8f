"""The unmodified Python SDK of E2B, its asyncio client, against Airlock."""

import asyncio
import unittest
import uuid

from e2b import (
    AsyncSandbox,
    AsyncSecret,
    AsyncTemplate,
    AsyncVolume,
    AuthenticationException,
    BuildException,
    CommandExitException,
    FileNotFoundException,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    SandboxException,
    SandboxNotFoundException,
    SandboxNotRunningException,
    SandboxQuery,
    SecretException,
    Template,
    TimeoutException,
    VolumeException,
)


class Async(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        self.run_id = uuid.uuid4().hex
        self.sbx = await AsyncSandbox.create(timeout=120, metadata={"run": self.run_id}, envs={"GLOBAL": "g"})

    async def asyncTearDown(self):
        await self.sbx.kill()

    async def test_commands(self):
        c = self.sbx.commands
        out = []

        async def keep(text):
            out.append(text)

        r = await c.run(r"echo $GLOBAL $MINE; printf '\xc3'; sleep 0.3; printf '\xa9'; echo e >&2", envs={"MINE": "m"}, on_stdout=keep)
        self.assertEqual((r.stdout, r.stderr, "".join(out)), ("g m\né", "e\n", "g m\né"))
        with self.assertRaises(CommandExitException) as e:
            await c.run("echo why >&2; exit 2")
        self.assertEqual((e.exception.exit_code, e.exception.stderr, e.exception.error), (2, "why\n", "exit status 2"))
        with self.assertRaises(InvalidArgumentException):
            await c.run("true", cwd="/no/such")
        with self.assertRaises(AuthenticationException):
            await c.run("true", user="nobody-here")
        self.assertEqual((await c.run("whoami", user="root")).stdout, "root\n")
        with self.assertRaises(TimeoutException):
            await c.run("sleep 60", timeout=1)

    async def test_background(self):
        c = self.sbx.commands
        h = await c.run("cat", background=True, stdin=True)
        self.assertIn(h.pid, [p.pid for p in await c.list()])
        await c.send_stdin(h.pid, "one\n")
        handle = c.stream_input(h.pid)
        for part in ("two", "\n"):
            await handle.send(part)
        await handle.close()
        await h.send_stdin("three\n")
        await c.close_stdin(h.pid)
        self.assertEqual((await h.wait()).stdout, "one\ntwo\nthree\n")
        self.assertEqual((h.stdout, h.stderr, h.exit_code), ("one\ntwo\nthree\n", "", 0))

        h = await c.run("sleep 60", background=True)
        second = await c.connect(h.pid)
        third = await c.connect(h.pid)
        await third.disconnect()
        self.assertTrue(await c.kill(h.pid))
        with self.assertRaises(CommandExitException):
            await second.wait()
        self.assertFalse(await h.kill())
        with self.assertRaises(NotFoundException):
            await c.connect(999_999)
        h = await c.run("cat", background=True, stdin=True)
        await h.close_stdin()
        self.assertEqual((await h.wait()).exit_code, 0)

        many = await asyncio.gather(*(c.run(f"echo {i}") for i in range(20)))
        self.assertEqual([r.stdout for r in many], [f"{i}\n" for i in range(20)])

    async def test_pty(self):
        seen = bytearray()
        h = await self.sbx.pty.create(PtySize(cols=80, rows=24), on_data=seen.extend)
        await self.sbx.pty.resize(h.pid, PtySize(cols=100, rows=30))
        await self.sbx.pty.send_stdin(h.pid, b"stty size\n")
        handle = self.sbx.pty.stream_input(h.pid)
        await handle.send(b"echo str")
        await handle.send(b"eamed; exit\n")
        await handle.close()
        await h.wait()
        for want in (b"30 100\r\n", b"streamed\r\n"):
            self.assertIn(want, bytes(seen))
        h = await self.sbx.pty.create(PtySize(cols=80, rows=24), on_data=seen.extend)
        second = await self.sbx.pty.connect(h.pid, on_data=seen.extend)
        self.assertTrue(await self.sbx.pty.kill(h.pid))
        with self.assertRaises(CommandExitException):
            await second.wait()

    async def test_files(self):
        f = self.sbx.files
        await f.write("a/é", "text")
        self.assertEqual(await f.read("a/é"), "text")
        await f.write("a/b", b"\0\xff")
        self.assertEqual(await f.read("a/b", format="bytes"), bytearray(b"\0\xff"))
        self.assertEqual(b"".join([part async for part in await f.read("a/b", format="stream")]), b"\0\xff")
        await f.write_files([{"path": "a/c", "data": "C"}])
        self.assertEqual([e.name for e in await f.list("a")], ["b", "c", "é"])
        self.assertEqual((await f.get_info("a/c")).size, 1)
        await f.rename("a/c", "a/d")
        self.assertFalse(await f.exists("a/c"))
        self.assertTrue(await f.make_dir("a/e"))
        await f.remove("a")
        with self.assertRaises(FileNotFoundException):
            await f.read("a/b")

    async def test_life(self):
        await self.sbx.set_timeout(300)
        self.assertEqual((await self.sbx.get_info()).metadata, {"run": self.run_id})
        again = await AsyncSandbox.connect(self.sbx.sandbox_id)
        self.assertTrue(await again.is_running())
        found = await AsyncSandbox.list(query=SandboxQuery(metadata={"run": self.run_id})).next_items()
        self.assertEqual([s.sandbox_id for s in found], [self.sbx.sandbox_id])
        for _ in range(60):
            metrics = await self.sbx.get_metrics()
            if metrics:
                break
            await asyncio.sleep(0.5)
        self.assertEqual(metrics[0].cpu_count, 2)
        h = await self.sbx.commands.run("sleep 60", background=True)
        ended = asyncio.create_task(h.wait())
        await asyncio.sleep(0.2)
        self.assertTrue(await self.sbx.kill())
        with self.assertRaises(SandboxNotRunningException):
            await ended
        self.assertFalse(await self.sbx.is_running())
        self.assertFalse(await AsyncSandbox.kill(self.sbx.sandbox_id))
        with self.assertRaises(SandboxNotRunningException):
            await self.sbx.commands.run("true")
        with self.assertRaises(SandboxNotFoundException):
            await self.sbx.get_info()

    async def test_not_supported(self):
        for error, what, call in [
            (SandboxException, "pausing", self.sbx.pause),
            (SandboxException, "pausing", self.sbx.beta_pause),
            (SandboxException, "forking", self.sbx.fork),
            (SandboxException, "snapshots", self.sbx.create_snapshot),
            (SandboxException, "snapshots", lambda: self.sbx.list_snapshots().next_items()),
            (BuildException, "templates of your own", lambda: AsyncTemplate.build(Template().from_base_image(), "mine")),
            (VolumeException, "volumes", lambda: AsyncVolume.create("v")),
            (SecretException, "secrets", lambda: AsyncSecret.exists("s")),
        ]:
            with self.subTest(what), self.assertRaisesRegex(error, f"501: this Airlock does not support {what}.* yet"):
                await call()
        self.assertTrue(await AsyncTemplate.exists("base"))


if __name__ == "__main__":
    unittest.main()
