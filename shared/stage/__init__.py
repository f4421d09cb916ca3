"""What every stage process has, whatever its role: the ring, the executor, the KV sender, the start."""
