"""How the shipped model `tiny_sd3` is made: its words, pictures, architecture and pre-training."""
