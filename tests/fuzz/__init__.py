"""Random programs beside native: see run.py."""
