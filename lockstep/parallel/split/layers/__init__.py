"""The arithmetic of each kind of layer in parts."""
