"""What flowrl claims about speed and learning, as programs whose results are committed beside them."""
