"""The load generator of `stagemesh bench`: a workload, clients that send it, and the figures of what came back."""
