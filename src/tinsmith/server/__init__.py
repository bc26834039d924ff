"""The server: the whole API on your own machine, with a real engine."""
