"""Assembly: what Dagster loads, and the command line. Nothing here decides or computes."""
