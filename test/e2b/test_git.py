"""The git module of the unmodified Python SDK, with both its clients. There is
no network: what is cloned and pushed to is in the sandbox."""

import asyncio
import inspect
import pathlib
import unittest

from e2b import AsyncSandbox, CommandExitException, GitAuthException, GitUpstreamException, InvalidArgumentException, Sandbox

UP, REPO, COPY = "/home/user/up.git", "/home/user/repo", "/home/user/copy"
URL = "http://127.0.0.1:8090/up.git"
SERVER = pathlib.Path(__file__).with_name("gitserver.py").read_text()


async def settle(value):
    """The value of a call of either client."""
    return await value if inspect.isawaitable(value) else value


class Git(unittest.IsolatedAsyncioTestCase):
    async def refuses(self, error, call, *args, **kwargs):
        with self.assertRaises(error) as e:
            await settle(call(*args, **kwargs))
        return e.exception

    async def check(self, sbx):
        git = sbx.git

        async def read(path):
            return await settle(sbx.files.read(path))

        async def write(path, text):
            await settle(sbx.files.write(path, text))

        await settle(git.init(UP, bare=True, initial_branch="main"))
        await settle(git.init(REPO, initial_branch="main"))
        await settle(git.configure_user("Ann", "ann@example.com"))
        self.assertEqual(await settle(git.get_config("user.name")), "Ann")
        await settle(git.set_config("pull.rebase", "false", scope="local", path=REPO))
        self.assertEqual(await settle(git.get_config("pull.rebase", scope="local", path=REPO)), "false")
        self.assertIsNone(await settle(git.get_config("no.such")))

        await write("repo/a b.txt", "one\n")
        status = await settle(git.status(REPO))
        self.assertEqual((status.current_branch, status.is_clean, status.untracked_count), ("main", False, 1))
        await settle(git.add(REPO, files=["a b.txt"]))
        self.assertEqual((await settle(git.status(REPO))).staged_count, 1)
        await settle(git.commit(REPO, "it's the \"first\""))
        await settle(git.commit(REPO, "second", author_name="Bob", author_email="bob@example.com", allow_empty=True))
        self.assertTrue((await settle(git.status(REPO))).is_clean)
        error = await self.refuses(CommandExitException, git.status, "/home/user/none")
        self.assertEqual(error.exit_code, 128)

        await settle(git.create_branch(REPO, "side"))
        await settle(git.checkout_branch(REPO, "main"))
        branches = await settle(git.branches(REPO))
        self.assertEqual((branches.current_branch, branches.branches), ("main", ["main", "side"]))
        await settle(git.delete_branch(REPO, "side", force=True))

        await write("repo/a b.txt", "two\n")
        await settle(git.restore(REPO, paths=["a b.txt"]))
        self.assertEqual(await read("repo/a b.txt"), "one\n")
        await write("repo/a b.txt", "three\n")
        await settle(git.add(REPO))
        await settle(git.reset(REPO, mode="hard", target="HEAD"))
        self.assertTrue((await settle(git.status(REPO))).is_clean)

        self.assertIsNone(await settle(git.remote_get(REPO, "origin")))
        await settle(git.remote_add(REPO, "origin", f"file://{UP}"))
        self.assertEqual(await settle(git.remote_get(REPO, "origin")), f"file://{UP}")
        await self.refuses(GitUpstreamException, git.pull, REPO)
        await settle(git.push(REPO, remote="origin", branch="main"))
        await settle(git.clone(f"file://{UP}", COPY, branch="main", depth=1))
        await write("repo/c.txt", "c\n")
        await settle(git.add(REPO))
        await settle(git.commit(REPO, "third"))
        self.assertEqual((await settle(git.status(REPO))).ahead, 1)
        await settle(git.push(REPO))
        await settle(git.pull(COPY))
        self.assertEqual(await read("copy/c.txt"), "c\n")

        await write("gitserver.py", SERVER)
        await settle(sbx.commands.run("git config http.receivepack true", cwd=UP))
        await settle(sbx.commands.run("python3 gitserver.py /home/user", background=True, timeout=0))
        await settle(sbx.commands.run("until (echo > /dev/tcp/127.0.0.1/8090) 2>/dev/null; do sleep 0.1; done"))
        await self.refuses(GitAuthException, git.clone, URL, "/home/user/w")
        await self.refuses(InvalidArgumentException, git.clone, URL, "/home/user/w", password="alone")
        await settle(git.clone(URL, "/home/user/w", username="ann", password="token"))
        self.assertEqual(await settle(git.remote_get("/home/user/w", "origin")), URL)  # the password is not kept
        await write("w/d.txt", "d\n")
        await settle(git.add("/home/user/w"))
        await settle(git.commit("/home/user/w", "fourth"))
        await self.refuses(GitAuthException, git.push, "/home/user/w", remote="origin", branch="main")
        await settle(git.push("/home/user/w", remote="origin", branch="main", username="ann", password="token"))
        await settle(git.dangerously_authenticate("ann", "token", host="127.0.0.1:8090", protocol="http"))
        await settle(git.pull("/home/user/w"))

    async def test_sync(self):
        sbx = Sandbox.create(timeout=120)
        try:
            await self.check(sbx)
        finally:
            sbx.kill()

    async def test_async(self):
        async with await AsyncSandbox.create(timeout=120) as sbx:
            await self.check(sbx)


if __name__ == "__main__":
    unittest.main()
