"""What Lightning's Trainer finds by the entry points of pyproject.toml: a callback where the variable
INFINITYBATCH_LIGHTNING is set, and nothing elsewhere.

No part of the package: a Trainer that does not ask for infinitybatch does not import it.
"""

import os
from typing import Any


def callbacks() -> list[Any]:
    """`INFINITYBATCH_LIGHTNING=memory_budget=8GiB,module=encoder` as a list of callbacks."""
    text = os.environ.get("INFINITYBATCH_LIGHTNING", "").strip()
    if not text:
        return []
    from infinitybatch.lightning import from_text

    return [from_text(text)]
