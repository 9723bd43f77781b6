# SPDX-License-Identifier: Apache-2.0
"""Write `bench/schema.json` anew: the JSON schema of each kind of file that a benchmark writes."""

import json
from pathlib import Path

import msgspec
from warmhold_entrypoint.bench.result import Result
from warmhold_entrypoint.bench.scaling import Scaling

PATH = Path(__file__).with_name("schema.json")


def build() -> str:
    """Return the text of the file: schemas by the first word of the result's name."""
    schemas = {
        name: {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
        for name, schema in (
            ("bench", msgspec.json.schema(Result)),
            ("scaling", msgspec.json.schema(Scaling)),
        )
    }
    return json.dumps(schemas, indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(build())
