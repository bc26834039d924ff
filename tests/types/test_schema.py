"""The schema document."""

import json
import subprocess
import sys

from tinsmith import types
from tinsmith.types.schema import json_schema


def test_every_public_type_is_described() -> None:
    assert json_schema()["$defs"].keys() == set(types.__all__) - {"PrecisionWarning"}


def test_the_module_prints_the_document() -> None:
    done = subprocess.run([sys.executable, "-m", "tinsmith.types.schema"], check=True, capture_output=True, timeout=60)
    assert json.loads(done.stdout) == json.loads(json.dumps(json_schema()))


def test_a_request_says_what_it_takes() -> None:
    definitions = json_schema()["$defs"]
    assert definitions["LossFnType"] == {"enum": sorted(definitions["LossFnType"]["enum"])}
    assert definitions["LoraConfig"]["properties"]["rank"] == {"type": "integer", "minimum": 1}
    assert definitions["ModelInput"]["properties"]["chunks"]["items"]["anyOf"][0] == {
        "$ref": "#/$defs/EncodedTextChunk"
    }
