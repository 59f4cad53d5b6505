"""Readouts: how the scores of a traversal's states become one ranking."""
