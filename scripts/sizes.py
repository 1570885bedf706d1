"""Print lines per package and fail where a file passes the house limits."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

LIMIT, LIMIT_WITH_REASON = 300, 400
REASON = "Longer than 300 lines because"
PRODUCT = ("services", "common", "router")


def main() -> int:
    """Return 1 when a file is too long, 0 otherwise."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], capture_output=True, text=True
    )
    totals: Counter[str] = Counter()
    broken = []
    for name in listed.stdout.split():
        path = Path(name)
        if not path.exists() or name.startswith("tests/data/"):
            continue
        text = path.read_text()
        lines = text.count("\n")
        totals[path.parts[0]] += lines
        most = LIMIT_WITH_REASON if path.parts[0] in PRODUCT else lines
        if lines > LIMIT and not (REASON in text and lines <= most):
            broken.append(
                f"{name} has {lines} lines; split it, or give the reason in its header "
                f"({REASON!r}; in the product at most {LIMIT_WITH_REASON})"
            )
    for package, lines in sorted(totals.items()):
        print(f"{package:12} {lines:6}")
    print("\n".join(broken))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
