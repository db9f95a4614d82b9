"""Generation: the one denoising loop and the engines that run it."""
