"""Metrics, suites, baselines and reports."""
