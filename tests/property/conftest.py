"""How hard property tests try: HYPOTHESIS_PROFILE is dev (default), ci (when CI is set) or night."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No deadline: a loaded two-core machine is no reason to fail. A failure prints the blob that repeats it.
_SHARED = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=50, **_SHARED)
settings.register_profile("ci", max_examples=500, derandomize=True, **_SHARED)
settings.register_profile("night", max_examples=20_000, **_SHARED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))
