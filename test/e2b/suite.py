"""Runs the tests of one module: suite.py MODULE.

As `python -m unittest --verbose MODULE`, but for the end: the process ends
without taking the interpreter apart, in which it was seen to abort after all
tests had passed (the SDK has native parts with threads). The tests have told
their result by then.
"""

import os
import sys
import unittest

result = unittest.main(module=sys.argv[1], argv=sys.argv[:1], verbosity=2, exit=False).result
sys.stdout.flush()
sys.stderr.flush()
os._exit(0 if result.wasSuccessful() and result.testsRun > 0 else 1)
