"""Operations over several lanes made of PyTorch's own kernels: autograd functions and custom ops."""
