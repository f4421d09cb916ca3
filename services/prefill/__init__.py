"""A stage of a prefill instance; its rank 0 hosts the head."""
