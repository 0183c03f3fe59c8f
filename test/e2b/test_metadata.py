"""Metadata of files with the unmodified Python SDK, both its clients."""

import unittest

from e2b import AsyncSandbox, InvalidArgumentException, Sandbox


class Metadata(unittest.IsolatedAsyncioTestCase):
    def test_sync(self):
        with Sandbox.create(timeout=60) as sbx:
            f = sbx.files
            self.assertEqual(f.write("a", "x", metadata={"Author": "ann"}).metadata, {"author": "ann"})
            self.assertEqual(f.get_info("a").metadata, {"author": "ann"})
            f.write_files([{"path": "d/b", "data": "b"}, {"path": "d/c", "data": "c"}], metadata={"n": "1"})
            self.assertEqual([e.metadata for e in f.list("d")], [{"n": "1"}, {"n": "1"}])
            self.assertEqual(f.rename("a", "e").metadata, {"author": "ann"})
            f.write("e", "y")  # each upload replaces all of it
            self.assertFalse(f.get_info("e").metadata)
            with self.assertRaises(InvalidArgumentException):
                f.write("a", "x", metadata={"k": "é"})

    async def test_async(self):
        async with await AsyncSandbox.create(timeout=60) as sbx:
            await sbx.files.write("a", "x", metadata={"k": "v"})
            self.assertEqual((await sbx.files.get_info("a")).metadata, {"k": "v"})


if __name__ == "__main__":
    unittest.main()
