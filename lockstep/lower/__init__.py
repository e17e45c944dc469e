"""Lowering: turns a model into what computes its lanes: lane by lane, batched, or a kernel set's folder."""
