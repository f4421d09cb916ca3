"""gRPC, in one place: options, errors, servers, stubs."""
