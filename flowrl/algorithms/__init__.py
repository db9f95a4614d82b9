"""Pure losses, one file per algorithm. They are given velocities and never import a model."""
