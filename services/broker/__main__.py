"""`python -m stagemesh.services.broker --config F`."""

import sys

from stagemesh.shared.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "broker")
    main()
