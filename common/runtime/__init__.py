"""What a room's process is made of: the model on its device, its pools, its socket, its loop."""
