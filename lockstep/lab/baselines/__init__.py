"""The same training run by every means: sequential C++, MPI, CUDA by hand, the known frameworks, Lockstep."""
