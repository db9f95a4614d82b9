"""Publication of weights: every engine verifies a whole version before any of them samples with it.

The driver (`publisher`) asks trainer rank 0 for a `manifest`, lets every engine compare it with its own module, starts
the transfer on all sides at once, compares the checksums of trainer and engines, and only then tells the engines to
commit. Any failure before that leaves every engine on the version it has.
"""
