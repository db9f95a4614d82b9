"""The command line: the only part of flowrl that knows Hydra."""
