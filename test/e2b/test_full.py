"""The unmodified Python SDK against a server that has room for one sandbox."""

import threading
import unittest

from e2b import RateLimitException, Sandbox


class Full(unittest.TestCase):
    def test_refused_and_tried_again(self):
        first = Sandbox.create(timeout=60)
        try:
            with self.assertRaisesRegex(RateLimitException, "not enough memory"):
                Sandbox.create(retries=0)
            killer = threading.Timer(1, first.kill)
            killer.start()
            self.assertTrue(Sandbox.create(timeout=60, retries=1).kill())
            killer.join()
        finally:
            first.kill()


if __name__ == "__main__":
    unittest.main()
