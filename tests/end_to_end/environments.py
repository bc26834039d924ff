"""Python environments for packages that cannot live in ours: made once, then found again."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path


def environment(requirement: str, *, on_top_of_ours: bool = False) -> Path:
    """The interpreter of an environment that holds this package and what it needs.

    One on top of ours takes from our environment what suits the package, and only the rest is installed.
    """
    folder = _cache_folder() / _name(requirement, on_top_of_ours)
    python = folder / "bin" / "python"
    whole = folder / "whole"
    if not whole.exists():
        # With our pip, because to install another takes seconds; and most of what is installed is never imported.
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        if on_top_of_ours:
            _let_see_our_packages(folder)
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", requirement]
        subprocess.run(pip, check=True, timeout=600)
        whole.touch()
    return python


def _cache_folder() -> Path:
    return Path(os.environ.get("TINSMITH_TEST_CACHE") or Path(tempfile.gettempdir()) / "tinsmith-test-cache")


def _name(requirement: str, on_top_of_ours: bool) -> str:
    name = f"{requirement.replace('==', '-')}-py{sys.version_info.major}{sys.version_info.minor}"
    return f"{name}-on-{_fingerprint()}" if on_top_of_ours else name


def _fingerprint() -> str:
    """Another one when our packages have moved or changed: what was left out for them might be missing then."""
    packages = sorted(f"{package.name}=={package.version}" for package in metadata.distributions())
    return hashlib.sha256("\n".join([sys.prefix, *packages]).encode()).hexdigest()[:12]


def _let_see_our_packages(folder: Path) -> None:
    """A later place in the search path, so that the environment's own versions come first."""
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    (own / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
