"""Steps, epochs and evaluation that stay on the device, and the images that are brought there."""
