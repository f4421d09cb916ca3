"""What stands in for a service of the wire and answers only a part of it."""

from __future__ import annotations

from typing import Any

from stagemesh.shared.errors import Rejected


class Partial:
    """Whatever rpc a double does not answer is refused: so one more on the wire needs no change of the doubles."""

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():
            raise AttributeError(name)
        return _refuse


async def _refuse(request: Any, context: Any) -> Any:
    raise Rejected("rpc", "is not answered by this double")
