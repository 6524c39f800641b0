"""Properties are tried with the same examples each time, however slow this computer is; `make fuzz` tries new ones."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("new", deadline=None)
settings.load_profile("new" if "REMUDA_FUZZ" in os.environ else "ci")
