"""C and CUDA C++ that is compiled and called at run time: the system's compiler, NVRTC, the GPU's driver."""
