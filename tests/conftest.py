"""What all tests rely on."""

import os
import signal

# The threads of two tests that compute at the same time would spin against each other. It is read when torch loads.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# A shell lets what it starts in the background ignore Ctrl-C, and so would every program that we start; but some tests
# send it to them.
signal.signal(signal.SIGINT, signal.default_int_handler)
