"""Training by T threads of a GPU, each bit the same at every T."""
