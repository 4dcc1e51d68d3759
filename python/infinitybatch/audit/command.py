"""`python -m infinitybatch audit package.module:function`: an audit with an exit code, for CI."""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from .report import AuditReport
from .watch import Watch

RIGHT, WRONG, NO_VERDICT = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """0: right. 1: wrong. 2: undecided, or nothing could be audited."""
    parser = argparse.ArgumentParser(
        prog="python -m infinitybatch audit",
        description="Calls a function that returns what ib.audit(...) or ib.audit.watch(...) gave, "
        "prints it, and exits with 0 (right), 1 (wrong) or 2 (no verdict).",
    )
    parser.add_argument("function", help="package.module:function, found from here")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    module, colon, name = options.function.partition(":")
    if not (module and colon and name):
        return _fail(f"{options.function} must be package.module:function")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except ImportError as error:
        return _fail(f"{module} cannot be imported: {error}")
    except AttributeError:
        return _fail(f"{module} has no function {name}")
    found = function()
    reports = list(found) if isinstance(found, (list, tuple)) else [found]
    if not reports or not all(isinstance(r, (AuditReport, Watch)) for r in reports):
        return _fail(
            f"{options.function} must return what ib.audit(...) or ib.audit.watch(...) gave, not "
            f"{type(found).__name__}: end it with `return watched`"
        )
    if options.json:
        print(json.dumps([report.as_dict() for report in reports], indent=1))
    else:
        print("\n".join(map(str, reports)))
    verdicts = {_verdict(report) for report in reports}
    return WRONG if "wrong" in verdicts else NO_VERDICT if "undecided" in verdicts else RIGHT


def _verdict(found: Any) -> str:
    return (found.report if isinstance(found, Watch) else found).verdict


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return NO_VERDICT
