"""The schedulers of the two roles: events in, instructions out."""
