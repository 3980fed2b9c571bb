"""`python -m kvtriage` is `kvtriage`."""

from __future__ import annotations

import sys

from kvtriage.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
