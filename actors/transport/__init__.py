"""How hidden states go from stage to stage and tokens back: by Ray, or by torch.distributed."""
