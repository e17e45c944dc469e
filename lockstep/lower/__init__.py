"""A model becomes a program over lanes: lane by lane, batched, fused or compiled; which one, and why."""
