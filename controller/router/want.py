"""What one request wants of the choice between replicas: its scoring profile, and its key. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.router.affinity import affinity
from controller.router.choose import Want
from controller.router.errors import ApiError, invalid
from controller.router.scoring import PROFILES

if TYPE_CHECKING:
    from controller.router.http1 import Request


def wanted(request: Request, document: dict[str, Any], usual: Want) -> Want | ApiError:
    """By the header X-Llmgw-Profile, else `usual`; an error that names the right words."""
    profile = usual.profile
    if not request.profile and not profile.near:
        return usual
    if request.profile:
        named = PROFILES.get(request.profile.decode("latin-1").strip())
        if named is None:
            return invalid(
                "unknown_profile",
                "The header X-Llmgw-Profile names a scoring profile that does not exist: use one "
                f"of {', '.join(PROFILES)}, or leave it away.",
            )
        profile = named
    return Want(profile, affinity(request.headers, document) if profile.near else None)
