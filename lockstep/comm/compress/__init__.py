"""Gradients made smaller before they travel, with the same bits by any number of workers."""
