"""How hidden states go from stage to stage and tokens back, and what the ranks of a stage share."""
