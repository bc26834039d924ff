"""In place of the bridge: to a cluster with GPUs that is lost at once; then to none, refused with what is asked for."""

from __future__ import annotations

import sys

import msgspec

from tinsmith.server.on_ray.messages import ClusterSettings, Report

if __name__ == "__main__":
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=ClusterSettings)
    is_first = settings.device == "auto"
    report = Report(is_ready=True, uses_gpus=True) if is_first else Report(refused=settings.device)
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
