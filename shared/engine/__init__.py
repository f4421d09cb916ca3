"""Scheduling and execution, pure and synchronous: no event loop, no network, no transfer engine in here."""
