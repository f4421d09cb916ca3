"""The router: the public API, and where a request runs."""
