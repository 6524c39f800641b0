"""Price tables from files: the table in the package, or a file of the user."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from remuda.domain.errors import UserError
from remuda.domain.reporting.prices import FIELD, PriceTable, parse_prices

#: A table of all instance types is smaller than a tenth of this.
MAX_BYTES = 2_000_000


def shipped_prices() -> PriceTable:
    text = resources.files("remuda.adapters.system").joinpath("prices.json").read_text(encoding="utf-8")
    return parse_prices(json.loads(text), name="prices.json")


def chosen_prices(path: str | None) -> PriceTable:
    """Return the user's price table, or the one in the package if `path` is empty."""
    return read_prices(Path(path)) if path else shipped_prices()


def read_prices(path: Path) -> PriceTable:
    fix = "give the path of a JSON price table, or omit the setting"
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"prices {str(path)[:80]!r} cannot be read: {reason}", field=FIELD, fix=fix) from None
    if len(text) > MAX_BYTES:
        raise UserError(f"prices {str(path)[:80]!r} is longer than {MAX_BYTES} bytes", field=FIELD, fix=fix)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"prices {str(path)[:80]!r} is not JSON: {error}", field=FIELD, fix=fix) from None
    return parse_prices(document, name=f"prices {str(path)[:80]!r}")
