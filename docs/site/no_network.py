"""Fails where a page of the site would load anything over the network."""

import re
import sys
from pathlib import Path

LOADS = re.compile(
    r"<(?:script|link|img|source|iframe|object|video|audio)\b[^>]*"
    r"\b(?:src|srcset|href|data)=\"(?:https?:)?//[^\"]*"
)
IMPORTS = re.compile(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^\"')]*")


def loads(page: Path) -> list[str]:
    """What a page or a style sheet loads from elsewhere."""
    text = page.read_text(errors="replace")
    found = LOADS.findall(text) if page.suffix == ".html" else []
    return found + (IMPORTS.findall(text) if page.suffix in (".html", ".css", ".svg") else [])


def main(folder: Path) -> int:
    pages = [page for page in folder.rglob("*") if page.suffix in (".html", ".css", ".svg")]
    found = [f"{page.relative_to(folder)}: {what}" for page in pages for what in loads(page)]
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
