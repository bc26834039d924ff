"""A fuzzer of the API: valid requests of every endpoint, bent in every way. `python -m tests.fuzz --help`."""
