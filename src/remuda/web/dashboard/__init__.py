"""`remuda dashboard`: a read-only web page with live updates of the pool."""
