"""What NCCL would hang on, found without it: the calls of all workers are noted, then played through."""
