"""Watching directories with the unmodified Python SDK: its blocking client asks
for events, its asyncio client is told."""

import asyncio
import time
import unittest

from e2b import AsyncSandbox, FileNotFoundException, FilesystemEventType, InvalidArgumentException, Sandbox, SandboxException, TimeoutException


class Watch(unittest.IsolatedAsyncioTestCase):
    def test_sync(self):
        with Sandbox.create(timeout=120) as sbx:
            files, events = sbx.files, []
            files.make_dir("w/deep")
            handle = files.watch_dir("w", recursive=True, include_entry=True)

            def seen(type, name):
                for _ in range(200):
                    events.extend(handle.get_new_events())
                    found = [e for e in events if (e.type, e.name) == (type, name)]
                    if found:
                        return found[0]
                    time.sleep(0.05)
                self.fail(f"no {type} of {name} in {events}")

            files.write("w/a", "text")
            seen(FilesystemEventType.CREATE, "a")
            self.assertEqual(seen(FilesystemEventType.WRITE, "a").entry.path, "/home/user/w/a")
            files.make_dir("w/new")
            seen(FilesystemEventType.CREATE, "new")
            files.write("w/new/b", "x")
            seen(FilesystemEventType.CREATE, "new/b")
            files.rename("w/a", "w/c")
            seen(FilesystemEventType.RENAME, "a")
            files.remove("w/c")
            seen(FilesystemEventType.REMOVE, "c")
            handle.stop()
            with self.assertRaises(SandboxException):
                handle.get_new_events()
            with self.assertRaises(FileNotFoundException):
                files.watch_dir("no")
            with self.assertRaises(InvalidArgumentException):
                files.watch_dir("/etc/passwd")

    async def test_async(self):
        async with await AsyncSandbox.create(timeout=120) as sbx:
            events, ends = asyncio.Queue(), asyncio.Queue()
            await sbx.files.make_dir("w")
            handle = await sbx.files.watch_dir("w", events.put, on_exit=ends.put, timeout=0)
            await sbx.files.write("w/a", "text")
            event = await asyncio.wait_for(events.get(), 10)
            self.assertEqual((event.type, event.name), (FilesystemEventType.CREATE, "a"))
            await handle.stop()
            self.assertIsNone(await asyncio.wait_for(ends.get(), 10))
            await sbx.files.watch_dir("w", events.put, on_exit=ends.put, timeout=1)
            self.assertIsInstance(await asyncio.wait_for(ends.get(), 10), TimeoutException)
            with self.assertRaises(FileNotFoundException):
                await sbx.files.watch_dir("no", events.put)


if __name__ == "__main__":
    unittest.main()
