"""`python -m stagemesh.services.router --config F`."""

import sys

from stagemesh.shared.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "router")
    main()
