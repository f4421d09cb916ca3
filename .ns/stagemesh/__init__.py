"""stagemesh: large language models on pipelines of prefill stages and pipelines of decode stages."""

__version__ = "0.1.0"
