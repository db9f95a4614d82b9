"""The configuration groups, shipped as `flowrl.configs`."""
