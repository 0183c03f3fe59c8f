"""Runs the tests of one module: suite.py MODULE.

As `python -m unittest --verbose MODULE`, but for the end: the SDK's HTTP
client (pyqwest) has threads of its own, which at times abort the interpreter
while it takes itself apart. By then the tests have told their result.
"""

import os
import sys
import unittest

result = unittest.main(module=sys.argv[1], argv=sys.argv[:1], verbosity=2, exit=False).result
sys.stdout.flush()
sys.stderr.flush()
os._exit(0 if result.wasSuccessful() and result.testsRun > 0 else 1)
