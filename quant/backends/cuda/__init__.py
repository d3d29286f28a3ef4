"""3-, 4- and 8-bit kernels in CUDA C++, compiled on the GPU's machine when they are first used."""
