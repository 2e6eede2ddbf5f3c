"""Experiments: presets, and running them."""
