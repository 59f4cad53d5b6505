"""Command-line entry points; the only place that knows Hydra."""
