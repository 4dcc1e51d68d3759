"""`python -m infinitybatch`: `audit` is Python's; all else is the command line's."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["audit"]:
        from .audit.command import main as audit

        sys.exit(audit(sys.argv[2:]))
    from infinitybatch_cli import main

    main()
