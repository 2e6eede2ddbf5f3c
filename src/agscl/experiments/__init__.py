"""Experiments: named presets, one run from start to end, comparisons, searches, studies and verification."""
