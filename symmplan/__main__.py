"""``python -m symmplan``, for where the console script is not on the path."""

from __future__ import annotations

from symmplan.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
