"""Tools for prompt files."""
