"""Bearer tokens, which are kept in environment variables and never shown."""

from __future__ import annotations

import os


def bearer_token(variable: str) -> str:
    """The token in an environment variable. Raises ValueError, which names the variable alone.

    What no header can carry as it is (RFC 6750, 2.1) is refused here: a library that has to send it may show it.
    """
    token = os.environ.get(variable, "")
    if not token:
        raise ValueError(f"the environment variable {variable} is not set")
    if not all("!" <= character <= "~" for character in token):
        hint = "perhaps a line end that came with it"
        raise ValueError(f"the environment variable {variable} may hold printable ASCII without spaces alone; {hint}")
    return token
