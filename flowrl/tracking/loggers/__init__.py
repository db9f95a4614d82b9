"""Loggers: one per file, all behind the two protocols of `base`. A new one is a file and a YAML."""
