"""The commands of operators: what each takes and gives, the same for NATS and for the command line."""
