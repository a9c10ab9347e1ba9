"""Who may call: one admin key, compared in constant time; users' names kept as keyed hashes."""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import Scope

from online_sao.gateway.problems import ApiError

PROTECTED = ("/v1", "/admin")
"""Path prefixes that need the key; health, version and metrics are open."""


class Keys:
    """Checks `Authorization: Bearer KEY`, and hashes what must not be kept in the clear."""

    def __init__(self, admin_key: str) -> None:
        if not admin_key:
            raise ValueError("an admin key is needed")
        self._digest = hashlib.sha256(admin_key.encode()).digest()
        self._user_key = hmac.digest(admin_key.encode(), b"online-sao user hash", "sha256")

    def check(self, scope: Scope) -> None:
        """Raise ApiError 401 unless the path is open or the request carries the key."""
        path: str = scope["path"]
        if not any(path == prefix or path.startswith(prefix + "/") for prefix in PROTECTED):
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, self._digest):
            raise ApiError(
                401,
                "invalid_api_key",
                "Send the key as `Authorization: Bearer KEY`.",
                headers={"www-authenticate": "Bearer"},
            )

    def user_hash(self, user: str | None) -> str | None:
        """HMAC-SHA-256 of a user's name: one name one hash, and no name to be read from it."""
        if user is None:
            return None
        return hmac.new(self._user_key, user.encode(), hashlib.sha256).hexdigest()
