"""Policy adapters, one file per model family."""
