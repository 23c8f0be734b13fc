"""Both micro benchmarks with their default settings: ``python -m benchmarks.micro``, or ``make bench-micro``."""

from __future__ import annotations

from benchmarks.micro import alignment, cycle

if __name__ == "__main__":
    alignment.main()
    cycle.main()
