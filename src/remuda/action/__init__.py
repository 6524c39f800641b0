"""The GitHub Action: the commands as a step of a workflow. `action.yml` at the root starts `python -m` this package."""
