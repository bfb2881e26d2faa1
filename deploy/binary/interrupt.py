"""Run before everything else in the one file: a Ctrl-C during the imports needs no traceback."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)
