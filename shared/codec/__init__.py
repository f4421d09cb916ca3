"""Between the values of `core` and the messages of `pb`. Nothing else reads or writes a message's fields twice."""
