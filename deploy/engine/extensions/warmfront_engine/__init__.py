"""Runs inside the engine's processes, in their environment; warmfront itself never imports it."""
