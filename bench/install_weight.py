"""What `pip install` brings: packages, and megabytes on the disk, numpy aside because nobody here lives without it."""

from __future__ import annotations

import json
import subprocess

import harness
from environments import ROOT, python_of
from harness import Numbers, Peer, Row

# Counts the files that pip recorded. An editable install records none of its own, so the source tree is added.
TEXT = """
import json, importlib.metadata as metadata
sizes = {}
for package in metadata.distributions():
    if package.name not in ("pip", "setuptools"):
        paths = [package.locate_file(file) for file in package.files or ()]
        sizes[package.name.lower()] = sum(path.stat().st_size for path in paths if path.exists())
print(json.dumps(sizes))
"""


def installed(peer: Peer) -> Numbers:
    done = subprocess.run([str(python_of(peer.environment)), "-c", TEXT], stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout))


def source_bytes() -> int:
    files = (ROOT / "src" / "tinsmith").rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file() and ".mypy_cache" not in file.parts)


def main() -> None:
    official, ours = installed(harness.OFFICIAL), installed(harness.OURS)
    ours["tinsmith"] += source_bytes()
    packages = [len(official) - 1, len(ours) - 1]
    light, with_numpy = (
        [sum(size for name, size in sizes.items() if name not in besides) / 1e6 for sizes in (official, ours)]
        for besides in (("numpy",), ())
    )
    harness.print_table(
        [
            Row("packages besides itself", packages, "10", packages[1] <= 10, 0),
            Row("MB besides numpy", light, "40", light[1] <= 40),
            Row("MB with numpy", with_numpy),
        ]
    )
    for name, sizes in (("tinker", official), ("tinsmith", ours)):
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:8]
        print(f"largest of {name} (MB): " + ", ".join(f"{each} {size / 1e6:.1f}" for each, size in largest))


if __name__ == "__main__":
    main()
