"""Whole training recipes on top of the SDK, for the command line and for scripts alike."""
