"""Benchmarks: executables that print one JSON object each, and what they share."""
