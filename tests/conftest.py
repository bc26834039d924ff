"""What all tests rely on."""

import signal

# A shell lets what it starts in the background ignore Ctrl-C, and so would every program that we start; but some tests
# send it to them.
signal.signal(signal.SIGINT, signal.default_int_handler)
