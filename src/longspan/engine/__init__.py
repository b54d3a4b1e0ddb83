"""The training engine: mesh, data, wrapping, optimizer, checkpoints, metrics, and the loop over them."""
