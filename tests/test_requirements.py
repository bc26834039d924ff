"""Nothing is claimed without a proof that exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| ([RH]\d+) \| .+ \| (.+) \| (.*) \|$", re.MULTILINE)
PAGE = (ROOT / "docs/reference/requirements.md").read_text(encoding="utf-8")


def proof_exists(proof: str) -> bool:
    path, _, test = proof.partition("::")
    base = ROOT if path.startswith(("bench/", "docs/")) or path == "README.md" else ROOT / "tests"
    file = base / path
    return file.exists() and (not test or f"def {test}(" in file.read_text(encoding="utf-8"))


def test_every_requirement_has_a_row() -> None:
    expected = [*(f"R{number}" for number in range(1, 130)), *(f"H{number}" for number in range(1, 38))]
    assert [row[0] for row in ROW.findall(PAGE)] == expected


def test_whatever_is_met_names_a_proof_that_exists() -> None:
    missing = {}
    for name, state, proofs in ROW.findall(PAGE):
        found = re.findall(r"`([^`]+)`", proofs)
        if state == "met" and not (found and all(map(proof_exists, found))):
            missing[name] = [proof for proof in found if not proof_exists(proof)]
    assert missing == {}
