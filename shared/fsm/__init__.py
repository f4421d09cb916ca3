"""The three state machines, a literal table each."""
