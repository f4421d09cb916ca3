"""gRPC, in one place: options, errors, servers, stubs."""

import os

# the library reads it once, when it is loaded; its notes on closing connections are no news to an operator
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# without it, every child that a process with connections starts runs the library's handler for forks before it becomes
# another program, and some of them crash in it; nobody here forks and goes on with gRPC
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
