"""How the buckets of a version travel: one file for each way."""
