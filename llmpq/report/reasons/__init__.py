"""Why a plan is as it is, in words: bits of layers, kernels, plans under changed conditions."""
