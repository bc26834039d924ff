"""What tests and benches share: a Tinker server of our own making, and probes of this process."""
