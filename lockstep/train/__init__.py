"""Training: model + kernel set → lanes → step → loop, told as events."""
