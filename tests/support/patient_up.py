"""`stagemesh` whose `up` kills nobody for standing still: what a test has stopped stays so until it goes on."""

from __future__ import annotations

import functools

from stagemesh.shared.cli.main import main
from stagemesh.shared.runtime import options

LONG_S = 600.0

if __name__ == "__main__":
    patient = functools.partial(options.Limits, stopped_s=LONG_S, watchdog_s=LONG_S)
    vars(options)["Limits"] = patient
    main()
