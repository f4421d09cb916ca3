"""The KV broker: who is there, and the tickets of KV transfers between them."""
