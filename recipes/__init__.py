"""The recipes, shipped as `flowrl.recipes`: one YAML each, differences from `configs/` alone."""
