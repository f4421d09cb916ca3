"""For all tests: no property test fails for being slow on a busy machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("stagemesh", deadline=None)
settings.load_profile("stagemesh")
