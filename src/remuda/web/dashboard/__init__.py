"""`remuda dashboard`: the fleet on a page, as it changes. Read-only."""
