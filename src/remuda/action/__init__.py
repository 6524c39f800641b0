"""The GitHub Action. `action.yml` runs this package with `python -m remuda.action`."""
