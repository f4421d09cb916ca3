"""gRPC, in one place: options, errors, servers, stubs."""

import os

# the library reads it once, when it is loaded; its notes on closing connections are no news to an operator
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
