"""A stage of a decode instance; its rank 0 hosts the head."""
