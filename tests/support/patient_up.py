"""`stagemesh` whose `up` kills nobody for standing still: what a test has stopped stays so until it goes on."""

from __future__ import annotations

import functools

from stagemesh.shared.cli.main import main
from stagemesh.shared.runtime import options

WATCHDOG_S = 600.0

if __name__ == "__main__":
    vars(options)["UpOptions"] = functools.partial(options.UpOptions, watchdog_s=WATCHDOG_S)
    main()
