"""`python -m stagemesh.services.decode --config F --instance I --rank R`."""

import sys

from stagemesh.shared.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "decode")
    main()
