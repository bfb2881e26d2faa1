"""Runs first in the one-file program: no traceback after Ctrl-C during the imports."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)
